"""The collectives of programs over real planes, and the groups that every rank makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from node_kit import on_all, planes_of
from torch import Tensor

from distensor.core import SYSTEM_CLOCK, Axis, ParallelConfig, RankLayout
from distensor.node.axes import ProcessGroupAxis
from distensor.node.groups import make_groups
from distensor.program.axes import Reduction
from distensor.testing.clock import FakeClock
from distensor.transport import DataPlane
from distensor.transport.group import TransportGroup

RANKS = 3
SIZES = [2, 0, 3]
T = TypeVar("T")


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(RANKS) as opened:
        yield opened


def on_axis(planes: dict[int, DataPlane], name: str, run: Callable[[ProcessGroupAxis], T]) -> list[T]:
    """`run` on every rank of one axis that holds all planes."""

    def of(rank: int) -> T:
        group = TransportGroup(planes[rank], range(RANKS), rank, name=name, timeout=20.0, clock=SYSTEM_CLOCK)
        try:
            return run(ProcessGroupAxis(group))
        finally:
            group.shutdown()

    return on_all([lambda rank=rank: of(rank) for rank in range(RANKS)])  # type: ignore[misc]


def own(axis: ProcessGroupAxis, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(axis.rank))


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("op", Reduction)
def test_all_reduce_leaves_its_argument_alone(planes: dict[int, DataPlane], op: Reduction) -> None:
    def run(axis: ProcessGroupAxis) -> tuple[Tensor, bool]:
        value = own(axis, 4, 5).t()
        result = axis.all_reduce(value, op)
        return result, torch.equal(value, own(axis, 4, 5).t())

    stacked = torch.stack([of_rank(rank, 4, 5).t() for rank in range(RANKS)])
    expected = stacked.sum(0) if op is Reduction.SUM else stacked.amax(0)
    results = on_axis(planes, f"reduce {op}", run)
    assert all(kept for _, kept in results)
    torch.testing.assert_close(results[0][0], expected)
    assert all(torch.equal(result, results[0][0]) for result, _ in results), "the same bits everywhere"


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_any_size_are_gathered_and_scattered(planes: dict[int, DataPlane], dim: int) -> None:
    """One rank owns nothing."""
    shape = [4, 4]
    shape[dim] = sum(SIZES)

    def run(axis: ProcessGroupAxis) -> tuple[Tensor, Tensor]:
        part = torch.split(of_rank(9, *shape), SIZES, dim)[axis.rank]
        return axis.all_gather(part, SIZES, dim), axis.reduce_scatter(own(axis, *shape), SIZES, dim)

    results = on_axis(planes, f"parts {dim}", run)
    total = torch.stack([of_rank(rank, *shape) for rank in range(RANKS)]).sum(0)
    for (gathered, scattered), expected in zip(results, torch.split(total, SIZES, dim), strict=True):
        assert torch.equal(gathered, of_rank(9, *shape))
        torch.testing.assert_close(scattered, expected)


def test_parts_change_places(planes: dict[int, DataPlane]) -> None:
    def run(axis: ProcessGroupAxis) -> list[Tensor]:
        parts = [torch.full((axis.rank, to), 10.0 * axis.rank + to) for to in range(RANKS)]
        return axis.all_to_all(parts, [(source, axis.rank) for source in range(RANKS)])

    for rank, received in enumerate(on_axis(planes, "all to all", run)):
        assert [tuple(part.shape) for part in received] == [(source, rank) for source in range(RANKS)]
        assert all(bool((part == 10 * source + rank).all()) for source, part in enumerate(received))


@pytest.mark.parametrize("steps", [-1, 0, 1, 2, 3])
def test_a_ring_passes_tensors_on(planes: dict[int, DataPlane], steps: int) -> None:
    def run(axis: ProcessGroupAxis) -> list[Tensor]:
        found, value = [], torch.full((axis.rank + 1,), float(axis.rank))
        for _ in range(3):
            source = (axis.rank - steps * (len(found) + 1)) % RANKS
            value = axis.shift(value, steps, (source + 1,))
            found.append(value)
        return found

    for rank, found in enumerate(on_axis(planes, f"ring {steps}", run)):
        for turn, value in enumerate(found, start=1):
            source = (rank - steps * turn) % RANKS
            assert torch.equal(value, torch.full((source + 1,), float(source)))


@pytest.mark.parametrize("order", ["tp-cp-pp-dp", "pp-dp-tp-cp", "dp-cp-tp-pp"])
def test_every_rank_makes_the_same_groups_and_keeps_its_own(order: str) -> None:
    parallel = ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, context_parallel=2, order=order)
    layout = RankLayout(parallel)
    made: list[list[list[int]]] = []
    for rank in range(16):
        calls: list[list[int]] = []

        class Group:
            def __init__(self, ranks: list[int], rank: int) -> None:
                self.ranks, self._me = ranks, rank

            def rank(self) -> int:
                return self.ranks.index(self._me)

            def size(self) -> int:
                return len(self.ranks)

        def new_group(ranks: list[int], calls: list[list[int]] = calls, rank: int = rank) -> Group | None:
            calls.append(ranks)
            return Group(ranks, rank) if rank in ranks else None

        groups = make_groups(layout, rank, new_group)
        made.append(calls)
        place = layout.coordinates(rank)
        assert {axis: group.rank for axis, group in groups.axes.items()} == {Axis.TP: place.tp, Axis.CP: place.cp}
        assert sorted(groups.gradients.ranks) == sorted(layout.group_of(rank, Axis.DP, Axis.CP))  # type: ignore[union-attr]
        assert groups.world.ranks == list(range(16))  # type: ignore[union-attr]
    assert all(calls == made[0] for calls in made)


def test_time_in_collectives_is_kept_apart_from_compute(planes: dict[int, DataPlane]) -> None:
    """On clocks that go on by one second at every look: from before a collective to after it."""

    class Ticking(FakeClock):
        def monotonic(self) -> float:
            self.advance(1.0)
            return super().monotonic()

    def of(rank: int) -> float:
        group = TransportGroup(planes[rank], range(RANKS), rank, name="time", timeout=20.0, clock=SYSTEM_CLOCK)
        axis = ProcessGroupAxis(group, Ticking())
        axis.all_reduce(torch.ones(2), Reduction.SUM)
        axis.shift(torch.ones(2), 1, (2,))
        group.shutdown()
        return axis.seconds

    assert on_all([lambda rank=rank: of(rank) for rank in range(RANKS)]) == [2.0] * RANKS  # type: ignore[misc]


def test_a_rank_alone_needs_no_group() -> None:
    groups = make_groups(RankLayout(ParallelConfig()), 0, lambda ranks: pytest.fail(f"a group of {ranks}"))
    assert (groups.world, groups.gradients, dict(groups.axes)) == (None, None, {})


@pytest.mark.parametrize("elements", [100, 40_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_travel_as_they_are_and_are_added_in_32_bits(
    planes: dict[int, DataPlane], dtype: torch.dtype, elements: int
) -> None:
    """To the bit what adding in float32 and rounding once gives, for half of the bytes; short and long messages."""
    before = [sum(link.bytes_sent for link in planes[rank].stats().values()) for rank in range(RANKS)]
    sizes = [elements // 2, 0, elements - elements // 2]

    def run(axis: ProcessGroupAxis) -> tuple[Tensor, Tensor]:
        value = own(axis, elements).to(dtype)
        return axis.all_reduce(value, Reduction.SUM), axis.reduce_scatter(value, sizes, 0)

    wide = sum(of_rank(rank, elements).to(dtype).float() for rank in range(RANKS))
    assert isinstance(wide, Tensor)
    pieces = wide.to(dtype).split(sizes)
    results = on_axis(planes, f"halves {dtype} {elements}", run)
    for rank, (whole, part) in enumerate(results):
        assert whole.dtype is dtype
        assert torch.equal(whole, wide.to(dtype))
        assert torch.equal(part, pieces[rank])
    after = [sum(link.bytes_sent for link in planes[rank].stats().values()) for rank in range(RANKS)]
    # An all-reduce sends each element to both others, or its shares twice; a reduce-scatter each to who keeps it.
    most = 2 * 2 * elements + 2 * elements + 2_000
    assert all(late - early <= most for early, late in zip(before, after, strict=True))


def test_another_backend_gets_halves_widened() -> None:
    """gloo rounds after each addition: 256 + 1 + 1 in bfloat16 would stay 256."""

    class Alone:
        """One member, which notes what it is given."""

        def __init__(self) -> None:
            self.seen: list[torch.dtype] = []

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

        def allreduce(self, tensors: list[Tensor], options: object) -> Alone:
            self.seen.append(tensors[0].dtype)
            return self

        def reduce_scatter(self, outs: list[Tensor], parts: list[list[Tensor]], options: object) -> Alone:
            self.seen.append(parts[0][0].dtype)
            outs[0].copy_(parts[0][0])
            return self

        def wait(self) -> bool:
            return True

    group = Alone()
    axis = ProcessGroupAxis(group)  # type: ignore[arg-type]
    value = torch.ones(4, dtype=torch.bfloat16)
    assert axis.all_reduce(value, Reduction.SUM).dtype is torch.bfloat16
    assert axis.reduce_scatter(value, [4], 0).dtype is torch.bfloat16
    assert group.seen == [torch.float32, torch.float32]
    assert axis.all_reduce(value.double(), Reduction.SUM).dtype is torch.float64
