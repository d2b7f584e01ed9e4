"""Every family, in 1, 2 and 4 stages, whole and in two unequal parts: loss and every gradient are the eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_families import FAMILIES, STAGE_COUNTS
from program_harness import (
    Result,
    eager,
    gradient_differences,
    loss_difference,
    run_cut,
    runners_of,
    uneven,
    whole_difference,
)
from torch import nn

from distensor.nn import DistributedModel, StageMapping
from distensor.program import Captured, Cut, cut

CaptureFamily = Callable[[str], tuple[nn.Module, Captured]]


def _cut(captured: CaptureFamily, name: str, count: int) -> tuple[nn.Module, Cut]:
    module, graph = captured(name)
    model = DistributedModel(module, stage_mapping=StageMapping(FAMILIES[name].stages(count)))
    return module, cut(graph, model.stages)


def _in_parts(module: nn.Module, pieces: Cut, batch: Any, loss: Any, parts: int) -> Result:
    """The eager module on the same parts, averaged by how many targets each has."""
    flat = pieces.flatten_batch(batch)
    total, summed, gradients = 0.0, 0.0, {}
    for part in pieces.split_rows(flat, uneven(next(iter(flat.values())).shape[0], parts)):
        whole = tuple(part.values()) if isinstance(batch, tuple) else part
        found = eager(module, whole, loss)
        weight = float(_targets(part))
        total += weight
        summed += weight * found.loss
        for name, gradient in found.gradients.items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + weight * gradient
    return Result(loss=summed / total, gradients={name: value / total for name, value in gradients.items()})


def _targets(part: dict[str, torch.Tensor]) -> int:
    labels = part.get("labels")
    if labels is None:
        return part["targets"].numel()
    return int((labels[:, 1:] != -100).sum()) if "input_ids" in part else labels.numel()


@pytest.mark.parametrize("stages", STAGE_COUNTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_part_is_what_eager_computes(captured: CaptureFamily, name: str, stages: int) -> None:
    family = FAMILIES[name]
    module, pieces = _cut(captured, name, stages)
    runners = runners_of(pieces)
    assert len(runners) == stages
    for rows, sequence in family.sizes:
        batch = family.batch(rows, sequence)
        reference = eager(module, batch, family.loss)
        ours = run_cut(pieces, runners, batch)
        assert loss_difference(ours, reference) <= 1e-7
        assert max(gradient_differences(ours, reference).values()) <= 2e-7


@pytest.mark.parametrize("stages", STAGE_COUNTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_unequal_parts_give_the_gradient_of_the_whole(captured: CaptureFamily, name: str, stages: int) -> None:
    family = FAMILIES[name]
    module, pieces = _cut(captured, name, stages)
    runners = runners_of(pieces)
    for rows, sequence in family.sizes:
        batch = family.batch(rows, sequence)
        reference = eager(module, batch, family.loss)
        ours = run_cut(pieces, runners, batch, parts=2)
        assert loss_difference(ours, reference) <= 1e-6
        assert whole_difference(ours, reference) <= 1e-6
        # One parameter alone: fp32 kernels round other shapes otherwise, up to 1.5e-6 where a gradient cancels.
        assert max(gradient_differences(ours, reference).values()) <= 3e-6


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert"])
def test_two_parts_are_what_eager_computes_on_the_same_parts(captured: CaptureFamily, name: str) -> None:
    family = FAMILIES[name]
    module, pieces = _cut(captured, name, 2)
    batch = family.batch(*family.sizes[0])
    reference = _in_parts(module, pieces, batch, family.loss, 2)
    ours = run_cut(pieces, runners_of(pieces), batch, parts=2)
    assert max(gradient_differences(ours, reference).values()) <= 2e-7


@pytest.mark.parametrize("name", FAMILIES)
def test_one_tensor_crosses_each_border(captured: CaptureFamily, name: str) -> None:
    _, pieces = _cut(captured, name, 4)
    for program, following in zip(pieces.programs, pieces.programs[1:], strict=False):
        assert len(program.outputs) == 1
        assert program.outputs == tuple(spec.value for spec in following.inputs_from("previous"))


def test_tied_parameters_are_named_once(captured: CaptureFamily) -> None:
    module, pieces = _cut(captured, "llama_tied", 4)
    (group,) = pieces.tied
    assert (group.name, group.stages) == ("model.embed_tokens.weight", (0, 3))
    held = {name for program in pieces.programs for name in (spec.name for spec in program.parameters)}
    assert held == {name for name, _ in module.named_parameters()}


def test_attention_mask_goes_to_every_stage_that_uses_it(captured: CaptureFamily) -> None:
    _, pieces = _cut(captured, "llama_masked", 4)
    received = [{spec.name for spec in program.inputs_from("batch")} for program in pieces.programs]
    assert received == [
        {"input_ids", "attention_mask"},
        {"attention_mask"},
        {"attention_mask"},
        {"labels", "attention_mask"},
    ]
