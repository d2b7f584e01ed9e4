"""StageRunner: what it is given is checked, values are freed, constants are made once, errors name the place."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from program_families import FAMILIES
from program_harness import cut_module, runners_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.core.errors import ProgramRejectedError
from distensor.program import Limits, Source, StageProgram, StageRunner, capture, check_shapes, cut


def squared(out: Any, given: Any) -> Tensor:
    return F.mse_loss(out, given[1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).train()


def batch(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 4)


def stages() -> tuple[StageRunner, StageRunner]:
    first, second = runners_of(cut_module(model(), batch(), [["0"], ["2"]], loss=squared))
    return first, second


def test_parameters_are_leaves_of_its_own() -> None:
    module = model()
    pieces = cut(capture(module, batch(), loss=squared))
    (runner,) = runners_of(pieces)
    parameter = runner.parameters["0.weight"]
    assert parameter.is_leaf
    assert parameter.requires_grad
    with torch.no_grad():
        parameter.add_(1)
    assert not torch.equal(parameter, module.get_parameter("0.weight"))


def test_a_change_of_parameters_is_seen() -> None:
    pieces = cut(capture(model(), batch(), loss=squared))
    (runner,) = runners_of(pieces)
    flat, name = pieces.flatten_batch(batch()), str(runner.program.loss)
    before = float(runner.forward(flat)[name].detach())
    with torch.no_grad():
        runner.parameters["2.bias"].add_(1)
    assert float(runner.forward(flat)[name].detach()) != before


def test_missing_and_wrong_inputs_are_named() -> None:
    first, second = stages()
    with pytest.raises(ProgramRejectedError, match=r"input 'inputs' is missing; got \['other'\]"):
        first.forward({"other": torch.randn(5, 4)})
    with pytest.raises(ProgramRejectedError, match=r"'inputs' is torch\.float64 \[5, 4\]; the program takes float32"):
        first.forward({"inputs": torch.randn(5, 4, dtype=torch.float64)})
    with pytest.raises(ProgramRejectedError, match=r"'inputs' is torch\.float32 \[5, 3\].*\[batch, 4\]"):
        first.forward({"inputs": torch.randn(5, 3)})
    (spec,) = second.program.inputs_from(Source.PREVIOUS)
    with pytest.raises(ProgramRejectedError, match=r"with \{'batch': 6\}"):
        second.forward({spec.name: torch.randn(5, 4), "targets": torch.randn(6, 4)})


def test_sizes_outside_the_captured_range_are_refused() -> None:
    family = FAMILIES["bert"]
    pieces = cut(capture(family.build(), family.batch(3, 12)))
    (runner,) = runners_of(pieces)
    given = family.batch(2, 80)
    with pytest.raises(ProgramRejectedError, match="dim 'sequence' is 80; this program runs from 1 to 64"):
        runner.forward(given)


def test_an_error_while_running_says_where() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)  # type: ignore[no-any-return]

    ids = torch.tensor([[0, 1], [2, 0]])
    pieces = cut(capture(Lookup().train(), (ids, torch.randn(2, 2, 4)), loss=squared))
    (runner,) = runners_of(pieces)
    with pytest.raises(IndexError) as caught:
        runner.forward({"inputs": ids + 5, "targets": torch.randn(2, 2, 4)})
    assert caught.value.__notes__ == ["while running aten.embedding.default in table"]


def test_values_are_freed_after_their_last_use() -> None:
    seen: list[weakref.ref[Tensor]] = []
    (runner,) = runners_of(cut(capture(model(), batch(), loss=squared)))
    function, gather, single, out, free = runner._tape.steps[0]
    later, *rest = runner._tape.steps[2]

    def watched(*args: Any) -> Tensor:
        made = function(*args)
        seen.append(weakref.ref(made))
        return made

    def alive(*args: Any) -> Tensor:
        assert seen[0]() is None
        return later(*args)

    runner._tape.steps[0] = (watched, gather, single, out, free)
    runner._tape.steps[2] = (alive, *rest)
    with torch.no_grad():
        runner.forward(dict(zip(("inputs", "targets"), batch(), strict=True)))
    assert seen


def test_constants_are_made_once_per_size() -> None:
    family = FAMILIES["llama"]
    pieces = cut(capture(family.build(), family.batch(4, 12)))
    (runner,) = runners_of(pieces)
    calls: list[int] = []
    function, *rest = runner._tape.constant[0]

    def counted(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    runner._tape.constant[0] = (counted, *rest)
    for rows, sequence in ((4, 12), (4, 12), (2, 12), (4, 12)):
        runner.forward(family.batch(rows, sequence))
    assert len(calls) == 2
    for sequence in range(3, 20):
        runner.forward(family.batch(2, sequence))
    assert len(runner._bindings) <= 8


def test_no_gradient_mode_gives_no_graph() -> None:
    first, _ = stages()
    with torch.no_grad():
        (value,) = first.forward({"inputs": torch.randn(5, 4)}).values()
    assert not value.requires_grad
    (value,) = first.forward({"inputs": torch.randn(5, 4)}).values()
    assert value.requires_grad


def test_cost_grows_with_the_batch() -> None:
    program = cut(capture(model(), batch(), loss=squared)).programs[0]
    small = check_shapes(program, Limits(), {"batch": 5})
    large = check_shapes(program, Limits(), {"batch": 50})
    assert small.weight_bytes == large.weight_bytes == 4 * (16 + 4) * 2
    assert large.activation_bytes > 9 * small.activation_bytes / 2
    assert large.work > 9 * small.work


def test_bytes_and_digest_are_canonical() -> None:
    one, other = (cut(capture(model(), batch(), loss=squared)).programs[0] for _ in range(2))
    assert one.to_json() == other.to_json()
    assert one.digest() == other.digest()
    assert len(one.digest()) == 64
    assert StageProgram.from_json(one.to_json()) == one


def test_bfloat16_modules_run() -> None:
    module = model().bfloat16()
    given = tuple(value.bfloat16() for value in batch())
    pieces = cut(capture(module, given, loss=squared))
    (runner,) = runners_of(pieces)
    result = runner.forward(pieces.flatten_batch(given))
    assert torch.equal(result[str(runner.program.loss)], squared(module(given[0]), given))
