"""Runs the stages of a cut by hand, as a pipeline would, and compares with the eager module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distensor.nn import DistributedModel, StageMapping
from distensor.program import Cut, Source, StageProgram, StageRunner, capture, cut, run_module


@dataclass(frozen=True, kw_only=True)
class Result:
    """Loss and gradients of one batch; what crossed the borders is kept for tests to look at."""

    loss: float
    gradients: Mapping[str, Tensor]
    crossing: tuple[tuple[str, ...], ...] = ()


def cut_module(module: nn.Module, example: Any, stages: Sequence[Sequence[str]] | None, **options: Any) -> Cut:
    """Capture and cut, by the declarations that users write."""
    model = DistributedModel(module, stage_mapping=StageMapping(stages) if stages else None)
    return cut(capture(module, example, **options), model.stages)


def runners_of(pieces: Cut) -> list[StageRunner]:
    """Each stage as a worker gets it: through its bytes."""
    loaded = [StageProgram.from_json(program.to_json()) for program in pieces.programs]
    assert tuple(loaded) == pieces.programs
    return [StageRunner(program, pieces.weights(program.stage)) for program in loaded]


def eager(module: nn.Module, batch: Any, loss: Any, *, autocast: bool = False) -> Result:
    """The reference: the module as it is, in one process. The backward pass of autocast is outside of it."""
    module.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = run_module(module, batch, loss)
    value.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return Result(loss=float(value.detach()), gradients=gradients)


def run_cut(pieces: Cut, runners: Sequence[StageRunner], batch: Any, parts: int = 1, *, seed: int = 0) -> Result:
    """Forward and backward of a batch in `parts` unequal parts, averaged by the weights of the parts."""
    flat = pieces.flatten_batch(batch)
    rows = next(iter(flat.values())).shape[0]
    total, summed = 0.0, 0.0
    gradients: dict[str, Tensor] = {}
    for part in pieces.split_rows(flat, uneven(rows, parts)):
        loss, weight, found = _run_part(runners, part, seed)
        total += weight
        summed += weight * loss
        for name, gradient in found.items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + weight * gradient
    averaged = {name: gradient / total for name, gradient in gradients.items()}
    crossing = tuple(tuple(spec.name for spec in runner.program.outputs) for runner in runners[:-1])
    return Result(loss=summed / total, gradients=averaged, crossing=crossing)


def uneven(rows: int, parts: int) -> list[int]:
    """4 rows in 2 parts are 1 and 3."""
    sizes = [1] * (parts - 1)
    return [*sizes, rows - len(sizes)]


def _run_part(
    runners: Sequence[StageRunner], part: Mapping[str, Tensor], seed: int
) -> tuple[float, float, dict[str, Tensor]]:
    for runner in runners:
        for parameter in runner.parameters.values():
            parameter.grad = None
    received: list[dict[str, Tensor]] = []
    sent: list[dict[str, Tensor]] = []
    for runner in runners:
        inputs = {
            spec.name: part[spec.name]
            if spec.source is Source.BATCH
            else sent[-1][spec.name].detach().requires_grad_(spec.requires_grad)
            for spec in runner.program.inputs
        }
        received.append(inputs)
        sent.append(runner.forward(inputs, seed=seed, training=True))
        for output in runner.program.outputs:
            value = sent[-1][output.name]
            assert value.requires_grad == output.requires_grad, output.name
    _backward(runners, received, sent)
    last = runners[-1].program
    loss, weight = sent[-1][str(last.loss)], sent[-1][str(last.weight)]
    return float(loss.detach()), float(weight), _summed_gradients(runners)


def _backward(
    runners: Sequence[StageRunner], received: Sequence[Mapping[str, Tensor]], sent: Sequence[Mapping[str, Tensor]]
) -> None:
    sent[-1][str(runners[-1].program.loss)].backward()
    for stage in range(len(runners) - 2, -1, -1):
        names = [spec.name for spec in runners[stage].program.outputs if spec.requires_grad]
        pairs = [(sent[stage][name], received[stage + 1][name].grad) for name in names]
        known = [(value, gradient) for value, gradient in pairs if gradient is not None]
        torch.autograd.backward([value for value, _ in known], [gradient for _, gradient in known])


def _summed_gradients(runners: Sequence[StageRunner]) -> dict[str, Tensor]:
    """By name; those of tied parameters are summed over their stages."""
    found: dict[str, Tensor] = {}
    for runner in runners:
        for name, parameter in runner.parameters.items():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                found[name] = found[name] + gradient if name in found else gradient
    return found


def loss_difference(ours: Result, reference: Result) -> float:
    return abs(ours.loss - reference.loss) / abs(reference.loss)


def gradient_differences(ours: Result, reference: Result) -> dict[str, float]:
    """norm(difference) / norm(reference) for each parameter; all must be there.

    A gradient that is zero but for rounding (key biases under softmax: 1e-9 of the others) has no relative
    difference of its own: below 1e-4 of the largest norm, that share of the largest counts as its size.
    """
    assert ours.gradients.keys() == reference.gradients.keys()
    floor = 1e-4 * max(_norm(gradient) for gradient in reference.gradients.values())
    return {
        name: _norm(ours.gradients[name] - expected) / max(_norm(expected), floor)
        for name, expected in reference.gradients.items()
    }


def whole_difference(ours: Result, reference: Result) -> float:
    """The same for all gradients as one vector."""
    difference = [_norm(ours.gradients[name] - expected) for name, expected in reference.gradients.items()]
    return math.hypot(*difference) / math.hypot(*(_norm(expected) for expected in reference.gradients.values()))


def _norm(value: Tensor) -> float:
    return float(value.double().norm())
