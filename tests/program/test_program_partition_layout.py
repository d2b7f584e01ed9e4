"""Layouts: views of cut dims against real tensors, slices, units and blocks; arithmetic with sizes of the batch."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distensor.core.errors import ShardingError
from distensor.program.collectives import Pieces
from distensor.program.expressions import Extent, Size, evaluate
from distensor.program.partitioning.extents import divided, normal, plus, times
from distensor.program.partitioning.layout import Layout, Origin, Shard, cropped, seen, views
from distensor.program.partitioning.plans import Plans, RestartError

_RANKS = 3


def held(full: Tensor, shard: Shard, rank: int) -> Tensor:
    """What a rank holds of a value whose sizes are numbers."""
    layout = shard.layout
    lengths, owners = [length for length, _ in layout.segments], [owner for _, owner in layout.segments]
    sizes = [size for size in (*lengths, layout.outer, layout.inner) if isinstance(size, int)]
    assert len(sizes) == len(lengths) + 2
    return Pieces(shard.dim, sizes[-2], sizes[-1], sizes[:-2], owners, _RANKS).pick(rank, full)


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[list[int], Shard, list[int]]:
    """A shape, a cut of one of its dims, and another shape of as many elements."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5))
    segments = tuple((length, draw(st.integers(0, _RANKS - 1))) for length in lengths)
    layout = Layout.of(segments, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3])))
    around = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=3))
    dim = draw(st.integers(0, len(around)))
    extent = layout.extent
    assert isinstance(extent, int)
    shape = [*around[:dim], extent, *around[dim:]]
    return shape, Shard(dim=dim, layout=layout), draw(_regrouped(shape))


def _regrouped(shape: list[int]) -> st.SearchStrategy[list[int]]:
    """Other dims for the same elements: prime factors in order, grouped anew."""
    factors = [prime for extent in shape for prime in _primes(extent)]

    def grouped(marks: list[bool]) -> list[int]:
        made = [1]
        for factor, mark in zip(factors, marks, strict=True):
            made = [*made, factor] if mark else [*made[:-1], made[-1] * factor]
        return made

    return st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)).map(grouped)


def _primes(number: int) -> list[int]:
    for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23):
        if number % prime == 0:
            return [prime, *_primes(number // prime)]
    return [number] if number > 1 else []


@settings(max_examples=200, deadline=None)
@given(cut_shapes())
def test_a_view_of_a_cut_value_is_cut_as_said(drawn: tuple[list[int], Shard, list[int]]) -> None:
    shape, shard, made = drawn
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for need in views(shape, shard, made):
        layout = seen(shard.layout, need)
        if layout is None:
            continue
        view = Shard(dim=need.dim, layout=layout)
        for rank in range(_RANKS):
            expected = held(full.reshape(made), view, rank)
            assert torch.equal(held(full, shard, rank).reshape(expected.shape), expected)


def test_normal_form() -> None:
    layout = Layout.of(((2, 0), (0, 1), (1, 0), (1, 1)), outer=2, inner=3)
    assert layout.segments == ((9, 0), (3, 1), (9, 0), (3, 1))
    assert (layout.outer, layout.inner) == (1, 1)
    assert [layout.held(rank) for rank in range(3)] == [18, 6, 0]
    assert cropped(layout, 6, 14).segments == ((3, 0), (3, 1), (2, 0))


def test_where_a_layout_lies_in_its_weight() -> None:
    """Queries, keys and values of 4 heads of 2: the block of one is seen three times."""
    fused = Layout.of(((4, 0), (4, 1)) * 3, origins={"w": Origin()})
    (heads,) = [need for need in views([24], Shard(dim=0, layout=fused), [3, 4, 2]) if need.dim == 1]
    layout = seen(fused, heads)
    assert layout is not None
    assert layout.segments == ((2, 0), (2, 1))
    assert layout.origins["w"] == Origin(scale=Fraction(2), periods=((3, Fraction(8)),))
    assert sorted(layout.origins["w"].positions(1)) == [2, 10, 18]
    assert sorted(layout.origins["w"].found(10)) == [-3, 1, 5]
    again = Layout.of(layout.segments, outer=3, inner=2, origins=layout.origins)
    assert again == fused
    assert again.origins["w"] == Origin()


def test_units_and_blocks_of_a_plan() -> None:
    plans = Plans({"w": (24, 8)}, {"w": 0}, 3)
    layout = plans.of["w"].start()
    assert layout.segments == ((8, 0), (8, 1), (8, 2))
    with pytest.raises(RestartError):
        plans.use_cuts(layout, [12, 18])
    plans.begin()
    blocks = plans.of["w"].start()
    assert blocks.segments == ((4, 0), (4, 1), (4, 2), *((2, 0), (2, 1), (2, 2)) * 2)
    queries = cropped(blocks, 0, 12)
    with pytest.raises(RestartError):
        plans.use_unit(queries, 4)
    assert plans.of["w"].blocks() == [(12, 4), (6, 1), (6, 1)]
    assert not plans.can_use_unit(cropped(blocks, 12, 18), 4)
    assert "2 units for tensor_parallel=3; use Replicate()" in plans.too_few(cropped(blocks, 12, 18), 3, "attention")


def test_a_way_out_is_refused_when_it_ends_in_a_gather() -> None:
    plans = Plans({"w": (6, 8)}, {"w": 0}, 2)
    layout = plans.of["w"].start()
    with pytest.raises(RestartError):
        plans.use_cuts(layout, [3], "'w' has too few units")
    plans.begin()
    plans.note_detour(layout)
    with pytest.raises(ShardingError, match="'w' has too few units"):
        plans.report()


_DIMS = {"batch": 3, "sequence": 5}
_ATOMS = st.one_of(st.integers(0, 6), st.sampled_from([Size("batch"), Size("sequence")]))


@st.composite
def sizes(draw: st.DrawFn) -> Extent:
    made = draw(_ATOMS)
    for _ in range(draw(st.integers(0, 4))):
        other = draw(_ATOMS)
        made = draw(st.sampled_from([plus, times]))((made, other))
        if draw(st.booleans()):
            made = Size(("//", made.tree if isinstance(made, Size) else made, draw(st.integers(1, 3))))
    return made


@settings(max_examples=200, deadline=None)
@given(st.lists(sizes(), min_size=1, max_size=4))
def test_sums_and_products_of_sizes(found: list[Extent]) -> None:
    numbers = [evaluate(size, _DIMS) for size in found]
    assert evaluate(plus(found), _DIMS) == sum(numbers)
    assert evaluate(times(found), _DIMS) == list(accumulate(numbers, lambda one, other: one * other))[-1]
    assert [evaluate(normal(size), _DIMS) for size in found] == numbers
    assert normal(plus(found)) == normal(plus(reversed(found)))
    assert normal(times(found)) == normal(times(reversed(found)))


@settings(max_examples=200, deadline=None)
@given(sizes(), sizes())
def test_exact_quotients_of_sizes(one: Extent, other: Extent) -> None:
    whole = divided(times((one, other)), other)
    if evaluate(other, _DIMS):
        assert whole is not None
    if whole is not None and evaluate(other, _DIMS):
        assert evaluate(whole, _DIMS) == evaluate(one, _DIMS)
    part = divided(one, other)
    if part is not None and evaluate(other, _DIMS):
        assert evaluate(part, _DIMS) * evaluate(other, _DIMS) == evaluate(one, _DIMS)


def test_sizes_in_any_order_are_the_same() -> None:
    one = Size(("*", "sequence", "batch"))
    other = Size(("*", "batch", ("+", "sequence", 0)))
    assert normal(one) == normal(other)
    assert divided(Size(("+", ("*", 2, "batch"), 4)), 2) == Size(("+", 2, "batch"))
    assert divided(Size("batch"), 2) is None
    assert divided(Size("batch"), 0) is None
    assert divided(0, Size("batch")) == 0
