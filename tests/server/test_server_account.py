"""The node's own account against a hub's books in memory: claims, receipts, losses, and sums that add up exactly."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fakes import FakeAccount

from distensor.core.control import Earnings, JobState, NodeInfo, Unit, UnitKey
from distensor.core.errors import HubUnreachableError, StoreError
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank, WorkerId
from distensor.core.parallel import ParallelConfig
from distensor.core.statement import RowKey, StatementQuery, StatementRow, UnitsQuery
from distensor.hub.metering import record_claims, record_receipts
from distensor.hub.records import JobRecord, NodeRecord, RankRecord
from distensor.testing.clock import FakeClock
from distensor_server.income import book as books_module
from distensor_server.income.book import AccountBook
from distensor_server.income.standing import Standing
from distensor_server.income.sync import Synchroniser
from distensor_server.income.values import Energy

NODE, OTHER, JOB = NodeId("n_1"), NodeId("n_2"), JobId("j_1")
S = Standing


def unit(step: int, size: int = 4, rank: int = 0) -> Unit:
    return Unit(key=UnitKey(job_id=JOB, epoch=Epoch(1), step=step, rank=Rank(rank)), micro_batches=size)


def hub_with_a_job() -> FakeAccount:
    """Ranks 0 and 1 are this node's, rank 2 another's."""
    account = FakeAccount()
    with account.store.transaction() as books:
        for node_id in (NODE, OTHER):
            info = NodeInfo(name=node_id.replace("_", "-"), host="h", version="1", devices=())
            books.save_node(NodeRecord(node_id=node_id, secret_hash=node_id, info=info))
        places = [(NODE, "gpu-a"), (NODE, "gpu-b"), (OTHER, "gpu-c")]
        ranks = tuple(
            RankRecord(rank=Rank(i), node_id=node, device_id=DeviceId(device), worker_id=WorkerId(f"w{i}"))
            for i, (node, device) in enumerate(places)
        )
        books.insert_job(
            JobRecord(
                job_id=JOB,
                owner="main",
                submission="s",
                name="job",
                parallel=ParallelConfig(data_parallel=3),
                epoch=Epoch(1),
                state=JobState.RUNNING,
                driver_certificate_pem="c",
                ranks=ranks,
            )
        )
    return account


class Pair:
    """An account of a node and its hub; a test moves both."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.hub = hub_with_a_job()
        self.book = AccountBook(path)
        self.book.open()
        self.again: list[Unit] = []
        self.sync = Synchroniser(book=self.book, source=self.hub, clock=self.clock, claim_again=self.again.append)

    def claims(self, *units: Unit, here: bool = True, there: bool = True) -> None:
        if here:
            self.book.claimed([(one, self.clock.now()) for one in units])
        if there:
            with self.hub.store.transaction() as books:
                record_claims(books, NODE, units, hour=self.hour)

    def receipts(self, *units: Unit) -> None:
        with self.hub.store.transaction() as books:
            record_receipts(books, "main", units, hour=self.hour)

    @property
    def hour(self) -> int:
        return int(self.clock.now() // 3600)

    def compare(self) -> Earnings:
        return asyncio.run(self.sync.run())

    def act(self, what: str, one: Unit) -> None:
        """One event of a history by its name."""
        actions: dict[str, Callable[[], object]] = {
            "claim": lambda: self.claims(one),
            "lost here": lambda: self.claims(one, here=False),
            "lost there": lambda: self.claims(one, there=False),
            "receipt": lambda: self.receipts(one),
            "compare": self.compare,
            "compact": self.book.compact,
            "reopen": lambda: (self.book.close(), self.book.open()),
            "wait": lambda: self.clock.advance(4000),
        }
        actions[what]()

    def units(self) -> dict[str, int]:
        return {kind.value: one.units for kind, one in self.book.counts().items() if one.units}


@contextmanager
def pair_in(directory: Path) -> Iterator[Pair]:
    path = directory / "account.sqlite"
    path.unlink(missing_ok=True)
    pair = Pair(path)
    try:
        yield pair
    finally:
        pair.book.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with pair_in(tmp_path) as made:
        yield made


def test_units_go_from_unconfirmed_to_matched(pair: Pair) -> None:
    pair.claims(unit(0), unit(1))
    pair.compare()
    assert pair.units() == {"unconfirmed": 2}
    pair.receipts(unit(0))
    earnings = pair.compare()
    assert pair.units() == {"matched": 1, "unconfirmed": 1}
    assert earnings.confirmed_micro == 4000 == sum(micro for _, micro in pair.book.own_sums().values())
    assert pair.book.lines_that_differ() == {}
    assert pair.again == []


def test_a_receipt_of_another_size_is_refused_with_both_sizes(pair: Pair) -> None:
    pair.claims(unit(0, 4))
    pair.receipts(unit(0, 3))
    pair.compare()
    (found,) = pair.book.units(S.REFUSED, None, 10)
    assert (found.claimed, found.hub_claimed, found.hub_received, found.micro) == (4, 4, 3, 0)


def test_what_only_the_hub_knows_is_found_by_the_sums(pair: Pair) -> None:
    """This node lost its record: the hub's statement says more than our units."""
    pair.claims(unit(0))
    pair.claims(unit(1), here=False)
    pair.receipts(unit(0), unit(1))
    pair.compare()
    assert pair.units() == {"matched": 1, "missing_here": 1}
    assert pair.book.lines_that_differ() == {}


def test_what_the_hub_never_heard_of_is_claimed_again_once_it_is_old(pair: Pair) -> None:
    pair.claims(unit(0), there=False)
    pair.compare()
    assert (pair.units(), pair.again) == ({"unconfirmed": 1}, [])
    pair.clock.advance(600)
    pair.compare()
    assert (pair.units(), pair.again) == ({"missing_there": 1}, [unit(0)])
    pair.claims(*pair.again, here=False)
    pair.receipts(unit(0))
    pair.compare()
    assert pair.units() == {"matched": 1}


def test_an_old_open_unit_does_not_make_us_read_everything_behind_it(pair: Pair) -> None:
    steps = [unit(step) for step in range(6000)]
    pair.claims(*steps)
    pair.receipts(*steps[1:-1])
    pair.compare()
    assert pair.units() == {"matched": 5998, "unconfirmed": 2}
    pair.hub.asked.clear()
    pair.compare()
    assert [query.from_step for query in pair.hub.asked if isinstance(query, UnitsQuery)] == [0, 5999]


def test_the_statement_is_fetched_from_its_last_hours_on(pair: Pair) -> None:
    for step in range(5):
        pair.claims(unit(step))
        pair.receipts(unit(step))
        pair.compare()
        pair.clock.advance(7200)
    since = [query.since_hour for query in pair.hub.asked if isinstance(query, StatementQuery)]
    assert since[0] == 0
    assert [hour - since[1] for hour in since[1:]] == [0, 2, 4, 6]
    assert sum(row.micro for row in pair.book.statement()) == 20_000


def test_a_hub_that_lost_its_books_is_read_anew(pair: Pair) -> None:
    pair.claims(unit(0), unit(1))
    pair.receipts(unit(0), unit(1))
    pair.compare()
    pair.hub.store = hub_with_a_job().store
    pair.compare()
    assert pair.book.statement() == []
    assert (pair.units(), pair.sync.lasting) == ({"unconfirmed": 2}, 0)
    pair.clock.advance(600)
    pair.compare()
    assert pair.again == [unit(0), unit(1)], "what can be claimed again is"


def test_compacted_units_that_the_hub_lost_stay_a_difference(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books_module, "MATCHED_KEPT", 0)
    for step in (0, 1):
        pair.claims(unit(step))
        pair.receipts(unit(step))
        pair.compare()
        pair.clock.advance(10)
    pair.book.compact()
    pair.hub.store = hub_with_a_job().store
    pair.compare()
    pair.compare()
    assert pair.sync.lasting == 1
    assert list(pair.book.lines_that_differ().values()) == [(8000, 0)]


def test_a_hub_that_is_away_leaves_what_was_known(pair: Pair) -> None:
    pair.claims(unit(0))
    pair.receipts(unit(0))
    pair.compare()
    pair.hub.failure = HubUnreachableError("no hub answers at hub.example:50051")
    with pytest.raises(HubUnreachableError):
        pair.compare()
    assert pair.units() == {"matched": 1}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "lost here", "lost there", "receipt", "compare", "compact", "reopen", "wait"]),
        st.integers(0, 5),
        st.sampled_from([0, 1]),
        st.sampled_from([1, 1, 1, 2]),
    ),
    max_size=40,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_after_any_history_own_sums_equal_the_hubs_ledger(
    tmp_path: Path, events: list[tuple[str, int, int, int]]
) -> None:
    """Claims lost on either side, compaction and restarts at any point: units are counted once, and sums are equal."""
    with pair_in(tmp_path) as pair, pytest.MonkeyPatch.context() as patch:
        patch.setattr(books_module, "MATCHED_KEPT", 2)
        for what, step, rank, size in events:
            pair.act(what, unit(step, size, rank))
        pair.clock.advance(4000)
        for _ in range(3):
            pair.compare()
        with pair.hub.store.transaction() as books:
            ledger = books.earnings(NODE)
        own = pair.book.own_sums()
        assert sum(micro for _, micro in own.values()) == ledger.confirmed_micro
        assert sum(units for units, _ in own.values()) == ledger.confirmed_units
        assert pair.book.hub_sums() == own
        counts = pair.book.counts()
        assert sum(one.micro for one in counts.values()) == ledger.confirmed_micro


def test_compaction_bounds_the_file_and_moves_no_sum(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books_module, "MATCHED_KEPT", 10)
    for day in range(3):
        units = [unit(step) for step in range(100 * day, 100 * day + 100)]
        pair.claims(*units)
        pair.receipts(*units)
        pair.compare()
        pair.clock.advance(86_400)
    before = pair.book.own_sums()
    pair.book.compact()
    assert pair.book.own_sums() == before
    assert pair.units() == {"matched": 300}
    assert len(pair.book.units(None, None, 500)) <= 100
    pair.claims(unit(5), there=False)  # read again from the receipts: it is known
    assert pair.units() == {"matched": 300}


def test_units_come_page_by_page_newest_first(pair: Pair) -> None:
    for step in range(7):
        pair.claims(unit(step))
        pair.clock.advance(10)
    first = pair.book.units(None, None, 3)
    last = first[-1]
    line = last.line
    second = pair.book.units(None, (last.seen, line.job_id, line.epoch, line.rank, last.step), 100)
    assert [one.step for one in [*first, *second]] == [6, 5, 4, 3, 2, 1, 0]


def test_hours_are_put_together_without_moving_a_sum(pair: Pair) -> None:
    def row(hour: int, micro: int) -> StatementRow:
        key = RowKey(hour=hour, job_id=JOB, epoch=Epoch(1), rank=Rank(0))
        return StatementRow(key=key, device_id=DeviceId("gpu-a"), units=1, micro=micro)

    def used(hour: int) -> Energy:
        return Energy(hour=hour, device="gpu-a", source="measured", millijoules=7, measured_ms=5, work_ms=9)

    pair.book.replace_statement(0, [row(1, 10), row(2, 20), row(3, 30)])
    pair.book.used([used(1), used(2), used(9)])
    pair.book.put_together({1: 1, 2: 1})
    assert [(one.key.hour, one.units, one.micro) for one in pair.book.statement()] == [(1, 2, 30), (3, 1, 30)]
    assert [(one.hour, one.millijoules, one.work_ms) for one in pair.book.energy()] == [(1, 14, 18), (9, 7, 9)]


def test_a_damaged_file_is_kept_aside_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "account.sqlite"
    path.write_bytes(b"torn" * 1000)
    book = AccountBook(path)
    assert "not a database" in (book.open() or "")
    book.claimed([(unit(0), 5.0)])
    book.close()
    assert (tmp_path / "account.sqlite.damaged").read_bytes() == b"torn" * 1000
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_identity_begins_another_account(tmp_path: Path) -> None:
    book = AccountBook(tmp_path / "account.sqlite")
    book.open()
    assert book.belongs_to("n_1")
    book.claimed([(unit(0), 5.0)])
    assert not book.belongs_to("../n_2")
    aside = book.begin_anew()
    assert aside == tmp_path / "account-n_1.sqlite"
    assert book.belongs_to("../n_2")
    assert book.units(None, None, 10) == []
    book.close()
    with sqlite3.connect(aside) as old:
        assert old.execute("SELECT count(*) FROM units").fetchone() == (1,)
    old.close()


def test_a_book_that_is_not_open_says_so(tmp_path: Path) -> None:
    book = AccountBook(tmp_path / "account.sqlite")
    with pytest.raises(StoreError, match=r"account\.sqlite is not open"):
        book.counts()
    with pytest.raises(StoreError, match="account"):
        AccountBook(tmp_path / "nowhere" / "account.sqlite").open()
