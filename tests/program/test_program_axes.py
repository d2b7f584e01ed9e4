"""Collective nodes: values and gradients on ranks that are threads, shapes on the meta device, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distensor.core.errors import ProgramRejectedError
from distensor.core.parallel import Axis
from distensor.program import Limits, Source, StageProgram, StageRunner, check_shapes
from distensor.program.axes import AxisGroup, Reduction
from distensor.program.collectives import Pieces
from distensor.program.expressions import Size
from distensor.program.values import AxisSpec, Dim, DType, InputSpec, Node, Ref, ValueSpec, WeightRef, WeightSpec
from distensor.testing.axes import Grid, MeetingError


def _program(nodes: Sequence[Node], weight: Sequence[int], rank: int, size: int = 2, **changes: Any) -> StageProgram:
    """loss = sum(nodes(w * x)) for a weight `w` and an input `x` of `batch` rows."""
    first = Node(op="aten.mul.Tensor", args={"self": WeightRef("w"), "other": Ref("x")}, out=("%0",))
    last = Node(op="aten.sum.default", args={"self": Ref(str(nodes[-1].out[0]))}, out=("%loss",))
    x = ValueSpec(name="x", dtype=DType.FLOAT32, shape=(Size("batch"), 1))
    fields: dict[str, Any] = {
        "stage": 0,
        "stages": 1,
        "dims": (Dim(name="batch", minimum=1, maximum=None, example=2),),
        "inputs": (InputSpec(value=x, source=Source.BATCH),),
        "outputs": (),
        "parameters": (WeightSpec(name="w", dtype=DType.FLOAT32, shape=tuple(weight), requires_grad=True),),
        "buffers": (),
        "nodes": (first, *nodes, last),
        "loss": "%loss",
        "weight": "%loss",
        "axes": (AxisSpec(name="tp", size=size, rank=rank),),
    }
    return StageProgram(**{**fields, **changes})


def _node(name: str, source: str = "%0", out: str = "%1", **args: Any) -> Node:
    return Node(op=f"dist.{name}.default", args={"self": Ref(source), **args, "axis": "tp"}, out=(out,))


CUT = {"dim": 1, "lengths": (2, 1, 2), "owners": (1, 0, 1)}
CASES: Mapping[str, tuple[Node, tuple[int, int], float]] = {
    "enter": (_node("enter"), (1, 3), 2.0),
    "reduce": (_node("reduce"), (1, 3), 1.0),
    "once": (_node("once"), (1, 3), 1.0),
    "split": (_node("split", **CUT), (1, 5), 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_each_collective(name: str) -> None:
    node, shape, factor = CASES[name]

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Tensor:
        program = StageProgram.from_json(_program([node], shape, place[Axis.TP]).to_json())
        runner = StageRunner(program, {"w": torch.ones(shape)}, axes=groups, limits=Limits())
        runner.forward({"x": torch.ones(2, 1)})["%loss"].backward()
        gradient = runner.parameters["w"].grad
        assert gradient is not None
        return gradient

    found = Grid({Axis.TP: 2}).run(run)
    expected = torch.full(shape, 2 * factor)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected if name != "once" else torch.zeros(shape))


def test_gather_orders_segments_and_slices_its_gradient() -> None:
    """Five columns: rank 1 holds 0, 1, 3, 4 and rank 0 holds 2; the gradient of column i is i."""
    weighted = Node(op="aten.mul.Tensor", args={"self": Ref("%1"), "other": WeightRef("c")}, out=("%2",))
    ramp = WeightSpec(name="c", dtype=DType.FLOAT32, shape=(5,))

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> tuple[float, list[float]]:
        rank = place[Axis.TP]
        columns = [[2.0], [0.0, 1.0, 3.0, 4.0]][rank]
        program = _program([_node("gather", **CUT), weighted], (1, len(columns)), rank, buffers=(ramp,))
        runner = StageRunner(program, {"w": torch.tensor([columns]), "c": torch.arange(5.0)}, axes=groups)
        loss = runner.forward({"x": torch.ones(1, 1)})["%loss"]
        loss.backward()
        gradient = runner.parameters["w"].grad
        assert gradient is not None
        return float(loss.detach()), gradient[0].tolist()

    assert Grid({Axis.TP: 2}).run(run) == [(30.0, [2.0]), (30.0, [0.0, 1.0, 3.0, 4.0])]


@pytest.mark.parametrize("outer", [1, 3])
@pytest.mark.parametrize("inner", [1, 2])
def test_pieces_gather_what_they_pick(outer: int, inner: int) -> None:
    lengths, owners = (2, 0, 1, 3), (2, 1, 0, 2)
    full = torch.randn(2, outer * 6 * inner, 2)

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Tensor:
        pieces = Pieces(1, outer, inner, lengths, owners, 3)
        return pieces.gather(groups[Axis.TP], pieces.pick(place[Axis.TP], full))

    assert all(torch.equal(found, full) for found in Grid({Axis.TP: 3}).run(run))


def test_sums_of_halves_are_made_in_32_bits() -> None:
    from distensor.program.collectives import reduce

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Tensor:
        values = [256.0, 1.0, 1.0, 1.0]
        return reduce(groups[Axis.TP], torch.tensor([values[place[Axis.TP]]], dtype=torch.bfloat16))

    # One after the other in bfloat16 every 1 is lost: 256 + 1 = 256.
    assert [float(value) for value in Grid({Axis.TP: 4}).run(run)] == [260.0] * 4


def test_two_axes_have_groups_of_their_own() -> None:
    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> list[float]:
        value = torch.tensor(10.0 * place[Axis.TP] + place[Axis.CP])
        parts = groups[Axis.TP].all_to_all([value, value + 0.5], [(), ()])
        around = groups[Axis.CP].shift(value, 1, ())
        return [float(groups[axis].all_reduce(value, Reduction.MAX)) for axis in groups] + [
            float(parts[1 - place[Axis.TP]]),
            float(around),
        ]

    found = Grid({Axis.TP: 2, Axis.CP: 3}).run(run)
    assert found[0] == [10.0, 2.0, 10.0, 2.0]
    assert found[5] == [12.0, 12.0, 2.5, 11.0]


def test_a_rank_that_fails_ends_the_waiting_of_the_others() -> None:
    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Tensor:
        if place[Axis.TP] == 1:
            raise KeyError("rank 1 is out")
        return groups[Axis.TP].all_reduce(torch.ones(1), Reduction.SUM)

    with pytest.raises(KeyError, match="rank 1 is out"):
        Grid({Axis.TP: 3}, timeout=20).run(run)


def test_ranks_that_call_different_collectives_are_told() -> None:
    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Tensor:
        return groups[Axis.TP].all_reduce(torch.ones(1 + place[Axis.TP]), Reduction.SUM)

    with pytest.raises(MeetingError, match="the ranks call"):
        Grid({Axis.TP: 2}, timeout=20).run(run)


def test_a_rank_that_waits_too_long_says_for_whom() -> None:
    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Tensor:
        if place[Axis.TP] == 1:
            return torch.ones(1)
        return groups[Axis.TP].all_reduce(torch.ones(1), Reduction.SUM)

    with pytest.raises(MeetingError, match=r"rank 0 waited 0.05 s in all_reduce .* there are \[0\]"):
        Grid({Axis.TP: 2}, timeout=0.05).run(run)


class _Silent:
    """A group that must not be used."""

    rank, size = 0, 2

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (None, "one of 2 on the axis 'tp'; its runner was given no group"),
        ({Axis.CP: _Silent()}, "one of 2 on the axis 'tp'"),
        ({Axis.TP: _Silent()}, "for rank 1 of 2 on the axis 'tp'; the group is rank 0 of 2"),
    ],
)
def test_a_runner_needs_the_groups_of_its_program(axes: Any, message: str) -> None:
    with pytest.raises(ProgramRejectedError, match=message):
        StageRunner(_program([_node("reduce")], (1, 3), 1), {"w": torch.ones(1, 3)}, axes=axes)


def _bad(change: Callable[[StageProgram], StageProgram]) -> bytes:
    return change(_program([_node("gather", **CUT)], (1, 1), 0)).to_json()


def _other(**args: Any) -> Callable[[StageProgram], StageProgram]:
    return lambda program: dataclasses.replace(
        program, nodes=(program.nodes[0], _node("gather", **{**CUT, **args}), program.nodes[2])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda program: dataclasses.replace(program, axes=()), "runs on the axis 'tp', declared are"),
        (lambda program: dataclasses.replace(program, axes=program.axes * 2), "axis 'tp' is declared twice"),
        (lambda program: dataclasses.replace(program, axes=(AxisSpec(name="tp", size=2, rank=2),)), "rank: 2"),
        (lambda program: dataclasses.replace(program, axes=(AxisSpec(name="dp", size=2, rank=0),)), "expected .tp or"),
        (_other(owners=(1, 0, 2)), "axis has 2 ranks"),
        (_other(owners=(1, 0)), "axis has 2 ranks"),
        (_other(lengths=(2, 2, 2)), "cannot run"),
        (_other(lengths=(2, -1, 2)), "cannot run"),
        (_other(lengths=(2**40, 1, 2)), "Limits.max_bytes"),
        (_other(dim=7), "cannot run"),
    ],
)
def test_hostile_collectives_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ProgramRejectedError, match=message):
        StageProgram.from_json(_bad(change))


def test_the_shape_check_knows_what_a_gather_makes() -> None:
    program = _program([_node("gather", **CUT)], (1, 1), 0)
    assert StageProgram.from_json(program.to_json()) == program
    cost = check_shapes(program, Limits(), {"batch": 4})
    assert cost.activation_bytes == 4 * 4 + 4 * 4 * 1 + 4 * 4 * 5 + 4
