"""Claims and receipts in any order, any number of times: each unit is credited once or never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hub_kit import info
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_kit import PostgresServer

from distensor.core.control import Earnings, JobState, Unit, UnitKey
from distensor.core.errors import ControlError
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank, WorkerId
from distensor.core.parallel import ParallelConfig
from distensor.core.statement import UnitState
from distensor.hub.metering import record_claims, record_receipts
from distensor.hub.records import JobRecord, NodeRecord, RankRecord
from distensor.hub.repository import Store
from distensor.hub.stores.sqlite import SqliteStore
from distensor.testing.hub_store import MemoryStore

JOB = JobId("j_1")
NODES = (NodeId("n_a"), NodeId("n_b"))


def unit(step: int, rank: int = 0, micro_batches: int = 4, epoch: int = 2) -> Unit:
    key = UnitKey(job_id=JOB, epoch=Epoch(epoch), step=step, rank=Rank(rank))
    return Unit(key=key, micro_batches=micro_batches)


def rank_of(rank: int, node_id: NodeId) -> RankRecord:
    return RankRecord(rank=Rank(rank), node_id=node_id, device_id=DeviceId("cpu"), worker_id=WorkerId(f"w{rank}"))


def fill(store: Store) -> None:
    """A job of two ranks on two nodes, at epoch 2."""
    with store.transaction() as books:
        for node_id in NODES:
            books.save_node(NodeRecord(node_id=node_id, secret_hash=node_id, info=info(node_id.replace("_", "-"))))
        books.insert_job(
            JobRecord(
                job_id=JOB,
                owner="main",
                submission="s",
                name="job",
                parallel=ParallelConfig(data_parallel=2),
                epoch=Epoch(2),
                state=JobState.RUNNING,
                driver_certificate_pem="c",
                ranks=tuple(rank_of(rank, node_id) for rank, node_id in enumerate(NODES)),
            )
        )


KINDS = ["memory", "sqlite", "postgresql"]


@contextmanager
def stores(kind: str, path: Path, postgres: PostgresServer | None = None) -> Iterator[Store]:
    if kind == "memory":
        store: Store = MemoryStore()
    elif kind == "sqlite":
        path.unlink(missing_ok=True)
        store = SqliteStore(path)
    else:
        assert postgres is not None
        store = postgres.store()
    with closing(store):
        fill(store)
        yield store


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Iterator[Store]:
    with stores(request.param, tmp_path / "hub.sqlite", postgres) as filled:
        yield filled


def claim(store: Store, *units: Unit, node_id: NodeId = NODES[0], hour: int = 1) -> tuple[str, ...]:
    with store.transaction() as books:
        return record_claims(books, node_id, units, hour=hour).refused


def receive(store: Store, *units: Unit, owner: str = "main", hour: int = 1) -> None:
    with store.transaction() as books, store.part():
        record_receipts(books, owner, units, hour=hour)


def earned(store: Store, node_id: NodeId = NODES[0]) -> Earnings:
    with store.transaction() as books:
        return books.earnings(node_id)


def state(store: Store, one: Unit) -> UnitState | None:
    with store.transaction() as books:
        found = books.find_units([one.key]).get(one.key)
        return None if found is None else found.state


def test_claim_then_receipt_is_credited(store: Store) -> None:
    claim(store, unit(0))
    assert earned(store) == Earnings(pending_units=1)
    receive(store, unit(0))
    assert earned(store) == Earnings(confirmed_micro=4000, confirmed_units=1)


def test_receipt_then_claim_is_credited(store: Store) -> None:
    receive(store, unit(0))
    assert earned(store) == Earnings()
    claim(store, unit(0))
    assert earned(store) == Earnings(confirmed_micro=4000, confirmed_units=1)


def test_the_node_that_worked_is_the_one_credited(store: Store) -> None:
    receive(store, unit(0, rank=0), unit(0, rank=1, micro_batches=2))
    claim(store, unit(0, rank=0), node_id=NODES[0])
    claim(store, unit(0, rank=1, micro_batches=2), node_id=NODES[1])
    assert (earned(store, NODES[0]).confirmed_micro, earned(store, NODES[1]).confirmed_micro) == (4000, 2000)


@pytest.mark.parametrize("receipt_first", [True, False])
def test_sizes_that_differ_are_kept_and_never_credited(store: Store, receipt_first: bool) -> None:
    steps = [lambda: claim(store, unit(0, micro_batches=5)), lambda: receive(store, unit(0, micro_batches=4))]
    for step in reversed(steps) if receipt_first else steps:
        step()
    assert state(store, unit(0)) is UnitState.MISMATCHED
    claim(store, unit(0, micro_batches=4))
    receive(store, unit(0, micro_batches=5))
    assert earned(store) == Earnings()
    with store.transaction() as books:
        found = books.find_units([unit(0).key]).get(unit(0).key)
    assert found is not None
    assert (found.claimed, found.received) == (5, 4)


def test_a_claim_for_another_nodes_rank_is_refused_and_the_rest_is_entered(store: Store) -> None:
    refused = claim(store, unit(0, rank=1), unit(1, rank=0), unit(0, rank=7), node_id=NODES[0])
    assert len(refused) == 2
    assert "rank 1" in refused[0]
    assert state(store, unit(0, rank=1)) is None
    assert earned(store).pending_units == 1


def test_a_receipt_for_another_trainers_job_enters_nothing(store: Store) -> None:
    with pytest.raises(ControlError, match="never placed"):
        receive(store, unit(0), owner="mallory")
    assert state(store, unit(0)) is None


def test_receipts_are_entered_all_or_none(store: Store) -> None:
    with pytest.raises(ControlError, match="never placed"):
        receive(store, unit(0), unit(0, rank=9))
    assert state(store, unit(0)) is None


def test_work_of_an_earlier_epoch_is_credited_to_who_did_it_then(tmp_path: Path) -> None:
    with stores("sqlite", tmp_path / "hub.sqlite") as store:
        with store.transaction() as books:
            books.save_rank(JOB, Epoch(1), rank_of(0, NODES[0]))  # as the membership before this one left it
        assert not claim(store, unit(0, epoch=1))
        assert earned(store).confirmed_units == 0
        receive(store, unit(0, epoch=1))
        assert earned(store).confirmed_units == 1


def test_an_epoch_that_was_never_is_refused(store: Store) -> None:
    assert claim(store, unit(0, epoch=3))
    with pytest.raises(ControlError):
        receive(store, unit(0, epoch=3))


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "receive"]),
        st.integers(min_value=0, max_value=3),
        st.sampled_from([0, 1]),
        st.sampled_from([1, 1, 1, 2]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_any_history_credits_exactly_what_agrees(
    tmp_path: Path, kind: str, events: list[tuple[str, int, int, int]]
) -> None:
    """Against the definition: the first claim and the first receipt of a unit, credited when equal."""
    first: dict[tuple[str, int, int], int] = {}
    with stores(kind, tmp_path / "hub.sqlite") as store:
        for action, step, rank, size in events:
            first.setdefault((action, step, rank), size)
            one = unit(step, rank, size)
            if action == "claim":
                claim(store, one, node_id=NODES[rank])
            else:
                receive(store, one)
        for rank, node_id in enumerate(NODES):
            claims = {step: size for (action, step, r), size in first.items() if (action, r) == ("claim", rank)}
            receipts = {step: size for (action, step, r), size in first.items() if (action, r) == ("receive", rank)}
            agreed = [size for step, size in claims.items() if receipts.get(step) == size]
            assert earned(store, node_id) == Earnings(
                confirmed_micro=1000 * sum(agreed),
                confirmed_units=len(agreed),
                pending_units=len(claims.keys() - receipts.keys()),
            )
