"""What a node may read of its own account: sums by the hour that equal the ledger, and single units."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_kit import PostgresServer
from test_hub_metering import JOB, KINDS, NODES, claim, earned, receive, stores, unit

from distensor.core.ids import Epoch, NodeId, Rank
from distensor.core.statement import (
    RowKey,
    StatementQuery,
    StatementRow,
    UnitsQuery,
    UnitState,
    hour_of,
)
from distensor.hub.repository import Store


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Iterator[Store]:
    with stores(request.param, tmp_path / "hub.sqlite", postgres) as filled:
        yield filled


def credit(store: Store, step: int, *, rank: int = 0, size: int = 4, hour: int = 1) -> None:
    one = unit(step, rank=rank, micro_batches=size)
    claim(store, one, node_id=NODES[rank], hour=hour)
    receive(store, one, hour=hour)


def all_rows(store: Store, node_id: NodeId = NODES[0], *, since: int = 0, most: int = 2000) -> list[StatementRow]:
    rows: list[StatementRow] = []
    after: RowKey | None = None
    while True:
        with store.transaction() as books:
            page = books.statement(node_id, StatementQuery(since_hour=since, after=after, most=most))
        assert page.paid_micro == 0
        assert len(page.rows) <= most
        rows += page.rows
        if not page.more:
            return rows
        after = page.rows[-1].key


def test_an_hour_of_the_clock_is_a_whole_number() -> None:
    assert [hour_of(now) for now in (0.0, 3599.9, 3600.0, 1_700_000_000.5)] == [0, 0, 1, 472_222]


def test_what_was_credited_in_one_hour_is_one_row(store: Store) -> None:
    for step, hour in ((0, 5), (1, 5), (2, 7)):
        credit(store, step, hour=hour)
    claim(store, unit(3), hour=7)  # no receipt: nothing is credited
    rows = all_rows(store)
    assert [(row.key.hour, row.units, row.micro, row.device_id) for row in rows] == [
        (5, 2, 8000, "cpu"),
        (7, 1, 4000, "cpu"),
    ]
    assert all_rows(store, since=6) == rows[1:]
    assert all_rows(store, NODES[1]) == []


def test_the_hour_is_that_of_the_posting_not_of_the_claim(store: Store) -> None:
    claim(store, unit(0), hour=5)
    receive(store, unit(0), hour=9)
    assert [row.key.hour for row in all_rows(store)] == [9]


def test_units_of_a_rank_come_with_their_state_and_only_to_their_node(store: Store) -> None:
    credit(store, 0)
    claim(store, unit(1))
    receive(store, unit(2))
    claim(store, unit(3, micro_batches=5))
    receive(store, unit(3))
    query = UnitsQuery(job_id=JOB, epoch=Epoch(2), rank=Rank(0), from_step=0)
    with store.transaction() as books:
        page = books.units(NODES[0], query)
        foreign = books.units(NODES[1], query)
        first = books.units(NODES[0], UnitsQuery(job_id=JOB, epoch=Epoch(2), rank=Rank(0), from_step=1, most=2))
    assert [(one.key.step, one.state, one.claimed, one.received, one.micro) for one in page.units] == [
        (0, UnitState.CREDITED, 4, 4, 4000),
        (1, UnitState.CLAIMED, 4, None, 0),
        (2, UnitState.RECEIVED, None, 4, 0),
        (3, UnitState.MISMATCHED, 5, 4, 0),
    ]
    assert (page.more, foreign.units, foreign.more) == (False, (), False)
    assert ([one.key.step for one in first.units], first.more) == ([1, 2], True)


CREDITS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0, 1]), st.integers(1, 9), st.integers(0, 4)),
    max_size=30,
    unique_by=lambda one: one[:2],
)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(postings=CREDITS, most=st.integers(1, 5))
def test_pages_of_any_size_add_up_to_the_ledger(
    tmp_path: Path, kind: str, postings: list[tuple[int, int, int, int]], most: int
) -> None:
    with stores(kind, tmp_path / "hub.sqlite") as store:
        for step, rank, size, hour in postings:
            credit(store, step, rank=rank, size=size, hour=hour)
        for node_id in NODES:
            rows = all_rows(store, node_id, most=most)
            whole = earned(store, node_id)
            assert rows == sorted(all_rows(store, node_id), key=lambda row: row.key)
            assert sum(row.micro for row in rows) == whole.confirmed_micro
            assert sum(row.units for row in rows) == whole.confirmed_units
