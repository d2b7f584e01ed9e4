"""A trainer objects to a node's work: it is held, all of it and exactly it, until the operator decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hub_kit import until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from postgres_kit import PostgresServer
from test_hub_metering import JOB, NODES, fill, unit
from test_hub_money import operator, place, refused, wanted

from distensor.core.control import Unit
from distensor.core.errors import ConfigError, ControlError
from distensor.core.ids import Rank
from distensor.core.statement import HOUR_SECONDS, NodeMoney
from distensor.hub import cashier, money, objections
from distensor.hub.administration import Clerk
from distensor.hub.ledger.accounts import Policy, held, trainer
from distensor.hub.ledger.transfers import MAY_BE_NEGATIVE
from distensor.hub.ledger_queries import node_money, totals
from distensor.hub.metering import record_claims, record_receipts
from distensor.hub.repository import Store
from distensor.hub.stores.sqlite import SqliteStore
from distensor.testing.hub_store import MemoryStore

CHEAT, HONEST = NODES
WINDOW = 2
HOURS = HOUR_SECONDS
POLICY = Policy(fee_per_mille=125, challenge_seconds=WINDOW * HOURS, micro_per_micro_batch=1001)


@contextmanager
def store_of(kind: str, tmp_path: Path, postgres: PostgresServer) -> Iterator[Store]:
    store: Store = MemoryStore()
    if kind != "memory":
        store = SqliteStore(tmp_path / "hub.sqlite") if kind == "sqlite" else postgres.store()
    with closing(store):
        begin(store)
        yield store


def begin(store: Store) -> None:
    fill(store)
    with store.transaction() as books:
        books.save_policy(POLICY)


def work(store: Store, *units: Unit, hour: int) -> None:
    """Claimed and received: credited."""
    with store.transaction() as books:
        for one in units:
            record_claims(books, NODES[one.key.rank], [one], hour=hour)
        record_receipts(books, "main", units, hour=hour)


def object_to(store: Store, *units: Unit, owner: str = "main", at: int = 0) -> None:
    with store.transaction() as books:
        objections.record_objections(books, owner, units, at=at)


def settle(store: Store, at: int) -> None:
    with store.transaction() as books:
        money.settle(books, at)


def decide(store: Store, *, good: bool, at: int = 0) -> int:
    with store.transaction() as books:
        return cashier.decide(books, Clerk(actor="test", now=at), JOB, CHEAT, good=good)


def there(store: Store, node: str = CHEAT) -> NodeMoney:
    with store.reading() as books:
        assert totals(books).total == 0
        return node_money(books, node)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Iterator[Store]:
    with store_of(request.param, tmp_path, postgres) as made:
        yield made


def price(store: Store) -> tuple[int, int]:
    """What one unit brings its node, and the fee."""
    with store.reading() as books:
        place = books.find_place(JOB, unit(0).key.epoch, unit(0).key.rank)
        assert place is not None
        amount = 4 * place.price
        return amount - amount * place.fee_per_mille // 1000, amount * place.fee_per_mille // 1000


def test_all_work_of_the_node_in_the_job_is_held_and_nothing_else(store: Store) -> None:
    share, _fee = price(store)
    work(store, unit(0), unit(0, rank=1), unit(1), hour=5)
    work(store, unit(2), hour=6)
    for _ in range(2):
        object_to(store, unit(1), at=7 * HOURS)
    assert (there(store).held, there(store).pending) == (3 * share, 0)
    assert (there(store, HONEST).held, there(store, HONEST).pending) == (0, share)
    work(store, unit(3), hour=6)
    assert there(store).pending == share, "until the next objection, or until it would become payable"
    object_to(store, unit(3))
    assert (there(store).held, there(store).pending) == (4 * share, 0)
    with store.reading() as books:
        (waiting,) = objections.held_work(books)
    assert (waiting.objections, waiting.since, waiting.micro) == (2, 0, 4 * sum(price(store)))


def test_nothing_of_a_node_under_objection_becomes_payable_also_what_is_credited_later(store: Store) -> None:
    share, _fee = price(store)
    object_to(store, unit(7))  # before there is anything to hold
    work(store, unit(0), unit(0, rank=1), hour=5)
    settle(store, (6 + WINDOW) * HOURS)
    assert there(store) == NodeMoney(credited=share, held=share, fees=0)
    assert there(store, HONEST).payable == share
    assert decide(store, good=True, at=9) == sum(price(store))
    assert there(store).payable == share, "where it would be without the objection"
    work(store, unit(1), hour=20)
    settle(store, (21 + WINDOW) * HOURS)
    assert there(store).payable == 2 * share, "a hold that was ended holds nothing more"


def test_void_work_goes_back_with_its_fee_and_is_not_void_twice(store: Store) -> None:
    share, fee = price(store)
    work(store, unit(0), unit(1), hour=5)
    object_to(store, unit(0))
    work(store, unit(2), hour=5)
    assert decide(store, good=False) == 3 * (share + fee)
    assert there(store) == NodeMoney(credited=3 * share, void=3 * share)
    with store.reading() as books:
        assert books.balance(trainer("main")) == 3 * (share + fee)
    with pytest.raises(ConfigError, match=r"nothing of node 'n_a' in job 'j_1' is held; `distensor hub hold list`"):
        decide(store, good=True)
    object_to(store, unit(0))  # decided for good
    settle(store, 100 * HOURS)
    assert there(store) == NodeMoney(credited=3 * share, void=3 * share)


def test_only_the_owner_of_the_job_can_object_and_only_to_what_was_placed(store: Store) -> None:
    work(store, unit(0), hour=5)
    for owner, one in (("eve", unit(0)), ("main", unit(0, rank=5)), ("main", unit(0, epoch=9))):
        with pytest.raises(ControlError, match="was never placed"):
            object_to(store, one, owner=owner)
    assert there(store).held == 0


class AnyTime(RuleBasedStateMachine):
    """Work, objections, decisions and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        begin(self.store)
        self.hour, self.steps = 5, 0
        self.released: set[str] = set()
        """Nodes that once were found right: what was held then is not held again."""

    @rule(rank=st.integers(0, 1))
    def work(self, rank: int) -> None:
        work(self.store, unit(self.steps, rank=rank), hour=self.hour)
        self.steps += 1

    @rule(step=st.integers(0, 9), rank=st.integers(0, 1))
    def object(self, step: int, rank: int) -> None:
        object_to(self.store, unit(step, rank=rank), at=self.hour * HOURS)

    @rule(hours=st.integers(1, 3))
    def time_passes(self, hours: int) -> None:
        self.hour += hours
        with self.store.transaction() as books:
            objected = {one.node_id for one in books.objections()} - self.released
        before = {node: there(self.store, node).payable for node in NODES}
        settle(self.store, self.hour * HOURS)
        for node in objected:
            assert there(self.store, node).payable == before[node], "nothing passes an objection"

    @rule(node=st.sampled_from(NODES), good=st.booleans())
    def decide(self, node: str, good: bool) -> None:
        with self.store.transaction() as books:
            if objections.decide(books, JOB, node, good=good, at=self.hour * HOURS) and good:
                self.released.add(node)

    @invariant()
    def everything_is_somewhere_once(self) -> None:
        for node in NODES:
            found = there(self.store, node)
            assert found.credited == found.pending + found.held + found.payable + found.void
        with self.store.reading() as books:
            for account, amount in books.account_balances().items():
                assert amount >= 0 or account in MAY_BE_NEGATIVE, account
            undecided = {one.node_id for one in books.objections()}
            for node in NODES:
                assert books.balance(held(node)) == 0 or node in undecided


TestAnyTime = AnyTime.TestCase
TestAnyTime.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


@pytest.mark.asyncio
async def test_an_objection_survives_a_kill_and_ends_by_the_operators_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "hub"
    async with place(tmp_path) as here:
        job_id, epoch = await here.call(here.client.submit_job, wanted("s1"))
        await until(lambda: len(here.node.held) == 2)
        await here.work(job_id, epoch, 0, 4)
        bad = Unit(key=replace(unit(0).key, job_id=job_id, epoch=epoch), micro_batches=4)
        with pytest.raises(ControlError, match="was never placed"):
            await here.call(here.client.object_to, [replace(bad, key=replace(bad.key, rank=Rank(7)))])
        for _ in range(2):
            await here.call(here.client.object_to, [bad])
        here.hub.kill()
        here.hub = await asyncio.to_thread(here.hub.restart)
        await until(lambda: here.node.connected)
        assert (await here.money()).held == 8000
        (held_,) = operator(state, capsys, "hold", "list")["held"]
        assert (held_["job_id"], held_["node_id"], held_["micro"]) == (job_id, here.node_id, 8000)
        assert "nothing of node" in refused(state, capsys, "hold", "void", job_id, "n_other")
        assert operator(state, capsys, "hold", "release", job_id, here.node_id, "--reason", "seen")["micro"] == 8000
        assert ((await here.money()).held, (await here.money()).pending) == (0, 8000)
        assert operator(state, capsys, "hold", "list")["held"] == []
        (line,) = [one for one in operator(state, capsys, "audit")["entries"] if one["action"] == "hold release"]
        assert line["target"] == f"{job_id} {here.node_id}"
