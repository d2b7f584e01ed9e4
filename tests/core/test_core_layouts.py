"""How weights are cut: every cut joins to the same weight, empty and uneven shards too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.errors import ShardingError
from distensor.core.layouts import WeightLayout, even_lengths


@st.composite
def layouts(draw: st.DrawFn) -> WeightLayout:
    ranks = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, 4), max_size=7))
    owners = [draw(st.integers(0, ranks - 1)) for _ in lengths]
    dim = draw(st.integers(0, 2))
    shape = [2, 3, 1]
    shape[dim] = sum(lengths)
    segments = tuple(zip(lengths, owners, strict=True))
    return WeightLayout(shape=tuple(shape), dim=dim, ranks=ranks, segments=segments)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_parts_join_to_the_whole(layout: WeightLayout) -> None:
    full = torch.arange(float(torch.Size(layout.shape).numel())).reshape(layout.shape)
    parts = [layout.take(full, rank) for rank in range(layout.ranks)]
    assert [tuple(part.shape) for part in parts] == [layout.local_shape(rank) for rank in range(layout.ranks)]
    assert torch.equal(layout.join(parts), full)
    assert sum(part.numel() for part in parts) == full.numel()


def test_uneven_and_empty_shards() -> None:
    assert WeightLayout.even((5, 8), 0, 2).segments == ((3, 0), (2, 1))
    short = WeightLayout.even((3, 2), 0, 5)
    assert [short.local_shape(rank) for rank in range(5)] == [(1, 2), (1, 2), (1, 2), (0, 2), (0, 2)]
    full = torch.randn(3, 2)
    assert torch.equal(short.join([short.take(full, rank) for rank in range(5)]), full)
    assert even_lengths(12, 2, 4) == (8, 4)


def test_global_shapes_are_not_local_ones_times_ranks() -> None:
    """[10, 2] over four ranks as 3, 3, 3, 1, and [2] as 1, 1, 0, 0."""
    for shape, lengths in (((10, 2), (3, 3, 3, 1)), ((2,), (1, 1, 0, 0))):
        layout = WeightLayout(shape=shape, dim=0, ranks=4, segments=tuple(zip(lengths, range(4), strict=True)))
        full = torch.randn(shape)
        parts = [layout.take(full, rank) for rank in range(4)]
        assert [part.shape[0] for part in parts] == list(lengths)
        assert torch.equal(layout.join(parts), full)


def test_fused_weights_have_several_ranges_for_each_rank() -> None:
    fused = WeightLayout(shape=(12,), dim=0, ranks=2, segments=((2, 0), (2, 1)) * 3)
    assert fused.ranges(1) == ((2, 4), (6, 8), (10, 12))
    assert fused.take(torch.arange(12), 1).tolist() == [2, 3, 6, 7, 10, 11]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ShardingError, match="no dim 2"):
        WeightLayout(shape=(4, 4), dim=2, ranks=1, segments=((4, 0),))
    with pytest.raises(ShardingError, match="segments of 3 in all cannot cover dim 0"):
        WeightLayout(shape=(4,), dim=0, ranks=1, segments=((3, 0),))
    with pytest.raises(ShardingError, match=r"ranks \[2\]; the axis has 2"):
        WeightLayout(shape=(4,), dim=0, ranks=2, segments=((4, 2),))
    with pytest.raises(ShardingError, match="6 is no multiple of 4"):
        even_lengths(6, 2, 4)
    layout = WeightLayout.even((4,), 0, 2)
    with pytest.raises(ShardingError, match=r"part of rank 1 has shape \[3\]; the layout says \[2\]"):
        layout.join([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ShardingError, match="3 parts of a weight that is cut for 2 ranks"):
        layout.join([torch.zeros(2)] * 3)
