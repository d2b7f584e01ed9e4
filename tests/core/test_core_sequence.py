"""Head-tail division of a sequence: against known tables, and its laws for every length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.errors import ConfigError
from distensor.core.sequence import HeadTail

TABLES = (
    # length, ranks, positions of each rank, causal pairs of each rank: torch's _HeadTailLoadBalancer
    (8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]], 18),
    (16, 2, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]], 68),
    (16, 4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]], 34),
    (24, 3, [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11, 12, 13, 14, 15]], 100),
)


@pytest.mark.parametrize(("length", "ranks", "positions", "pairs"), TABLES)
def test_known_tables(length: int, ranks: int, positions: list[list[int]], pairs: int) -> None:
    division = HeadTail(ranks=ranks)
    assert [list(division.positions(length, rank)) for rank in range(ranks)] == positions
    assert list(division.rearrange(length)) == [place for part in positions for place in part]
    assert [division.causal_pairs(length, rank) for rank in range(ranks)] == [pairs] * ranks


def test_restore_as_the_table_has_it() -> None:
    assert HeadTail(ranks=2).restore(8) == (0, 1, 4, 5, 6, 7, 2, 3)
    assert HeadTail(ranks=4).restore(16) == (0, 1, 4, 5, 8, 9, 12, 13, 14, 15, 10, 11, 6, 7, 2, 3)


def test_eight_ranks_of_forty_eight() -> None:
    division = HeadTail(ranks=8)
    assert division.positions(48, 7) == (21, 22, 23, 24, 25, 26)
    assert {division.causal_pairs(48, rank) for rank in range(8)} == {147}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(1, 6), st.data())
def test_every_position_has_one_owner(length: int, ranks: int, data: st.DataObject) -> None:
    weights = data.draw(st.one_of(st.just(()), st.tuples(*[st.integers(1, 9)] * ranks)))
    division = HeadTail(ranks=ranks, weights=weights)
    order = division.rearrange(length)
    assert sorted(order) == list(range(length))
    assert [order[place] for place in division.restore(length)] == list(range(length))
    assert sum(division.causal_pairs(length, rank) for rank in range(ranks)) == length * (length + 1) // 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200), st.integers(1, 8))
def test_shards_of_any_length_differ_by_two_at_most(length: int, ranks: int) -> None:
    sizes = [len(HeadTail(ranks=ranks).positions(length, rank)) for rank in range(ranks)]
    assert max(sizes) - min(sizes) <= 2


def test_weights_give_proportional_shards() -> None:
    division = HeadTail(ranks=2, weights=(3, 1))
    assert division.chunks(16, 0) == ((0, 6), (10, 16))
    assert division.chunks(16, 1) == ((6, 8), (8, 10))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.data())
def test_from_the_shortest_length_on_nobody_is_empty(ranks: int, data: st.DataObject) -> None:
    weights = data.draw(st.one_of(st.just(()), st.tuples(*[st.integers(1, 9)] * ranks)))
    division = HeadTail(ranks=ranks, weights=weights)
    length = division.shortest + data.draw(st.integers(0, 40))
    assert all(division.positions(length, rank) for rank in range(ranks))


@pytest.mark.parametrize(("ranks", "shortest"), [(1, 1), (2, 2), (3, 3), (4, 6), (5, 8)])
def test_the_shortest_length_is_exact(ranks: int, shortest: int) -> None:
    """Five positions over four ranks leave one rank without any, though four do not."""
    division = HeadTail(ranks=ranks)
    assert division.shortest == shortest
    if ranks > 1:
        assert not all(division.positions(shortest - 1, rank) for rank in range(ranks))
    assert all(division.positions(length, rank) for rank in range(ranks) for length in range(shortest, 8 * ranks))


def test_short_sequences_leave_chunks_empty() -> None:
    assert [HeadTail(ranks=3).positions(2, rank) for rank in range(3)] == [(1,), (), (0,)]


def test_labels_are_shifted_before_the_split() -> None:
    """Labels of positions 0..7 after the causal shift, at two ranks: the boundary belongs to the next chunk."""
    shifted = [*range(1, 8), -100]
    parts = [[shifted[place] for place in HeadTail(ranks=2).positions(8, rank)] for rank in range(2)]
    assert parts == [[1, 2, 7, -100], [3, 4, 5, 6]]


@pytest.mark.parametrize(("ranks", "weights"), [(0, ()), (2, (1,)), (2, (1, 0))])
def test_what_cannot_be_divided_is_named(ranks: int, weights: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=str(ranks)):
        HeadTail(ranks=ranks, weights=weights)
