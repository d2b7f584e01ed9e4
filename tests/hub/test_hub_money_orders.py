"""Money through the real service and both databases: any order, duplication, loss and retry of claims, receipts,
deposits, payouts and checks, with restarts of the hub and a clock that goes on.

All accounts sum to 0, each unit is credited at most once and exactly where claim and receipt agree, and nobody falls
below nothing who must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import info, spec, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_kit import FakeSigner
from postgres_kit import PostgresServer
from test_hub_month import DAY, PATIENCE, Stream

from distensor.comm.keys import KeyKind
from distensor.comm.messages import Claims, Heartbeat, Register
from distensor.comm.server import Principal
from distensor.core.control import JobState, Unit, UnitKey
from distensor.core.errors import ConfigError, ControlError, LedgerError
from distensor.core.ids import Epoch, JobId, NodeId, Rank, new_node_id
from distensor.hub import cashier, money
from distensor.hub.administration import Clerk, add_account
from distensor.hub.authorization import Who, scopes_of
from distensor.hub.hashing import new_secret
from distensor.hub.ledger.accounts import Ledger, Policy
from distensor.hub.ledger.transfers import MAY_BE_NEGATIVE
from distensor.hub.ledger_queries import job_cost, node_money, totals
from distensor.hub.machine import HubMachine
from distensor.hub.records import NodeRecord
from distensor.hub.repository import Store
from distensor.hub.service import HubService, Mint
from distensor.hub.stores.sqlite import SqliteStore
from distensor.hub.writer import Writer
from distensor.testing.clock import FakeClock

NODES = (NodeId("n_0"), NodeId("n_1"))
TRAINERS = ("ann", "bob")
PRICE = 1001
WINDOW = 7200
JOBS, STEPS, RANKS = st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)
SIZES = st.sampled_from([1, 1, 1, 2])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(TRAINERS), st.integers(0, 2)),
        st.tuples(st.sampled_from(["claim", "receive"]), JOBS, STEPS, RANKS, SIZES),
        st.tuples(st.sampled_from(["claim", "receive"]), JOBS, STEPS, RANKS, SIZES),
        st.tuples(st.just("deposit"), st.sampled_from(TRAINERS), st.integers(0, 2), st.sampled_from([3000, 9000])),
        st.tuples(st.just("end"), JOBS, st.sampled_from([JobState.FINISHED, JobState.FAILED])),
        st.tuples(st.just("time"), st.sampled_from([3600, WINDOW + 3600, -3600])),
        st.tuples(st.just("pay"), st.sampled_from(NODES), st.integers(0, 2), st.sampled_from([None, 500])),
        st.tuples(st.just("answer"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("check"), JOBS, STEPS, RANKS, st.sampled_from([None, True, False])),
        st.tuples(st.just("terms"), st.booleans(), st.sampled_from([0, 77])),
        st.tuples(st.just("restart")),
    ),
    min_size=10,
    max_size=40,
)
FIRST = [("submit", "ann", 0), ("submit", "bob", 2)]
"""So that there is something to claim from the beginning."""


@dataclass
class Hub:
    """A service on a store, which may be started again; and what this file knows of its units."""

    store: Store
    clock: FakeClock
    jobs: list[tuple[JobId, str]] = field(default_factory=list)
    fees: dict[JobId, int] = field(default_factory=dict)
    first: dict[tuple[str, UnitKey], int] = field(default_factory=dict)
    fee_per_mille: int = 0
    batches: int = 0
    submissions: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[HubService, Writer, dict[NodeId, Stream]]]:
        at = int(self.clock.now())
        with self.store.transaction() as books:
            generation, snapshot = books.begin_generation(), books.snapshot()
            money.give_back_orphans(books, at)
        machine = HubMachine(
            generation=generation,
            nodes=snapshot.nodes,
            jobs=snapshot.jobs,
            submissions=snapshot.submissions,
            earnings=snapshot.earnings,
            signer=FakeSigner(),
            new_job_id=lambda: JobId(f"j_{len(self.jobs)}_{self.submissions}"),
            patience=PATIENCE,
            now=self.clock.monotonic(),
        )
        lines: list[str] = []
        writer = Writer(self.store, self.clock, lambda error: lines.append(str(error)))
        service = HubService(machine, writer, self.clock, Mint(node_id=new_node_id, secret=new_secret), lines.append)
        working = asyncio.create_task(service.run())
        streams = {}
        for node in snapshot.nodes:
            streams[node.node_id] = stream = Stream()
            who = Principal(kind=Who.NODE, subject=node.node_id)
            await service.node_joined(who, Register(info=node.info, running=()), stream)
            service.node_said(stream, Heartbeat(sequence=1))
        try:
            yield service, writer, streams
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await writer.close()
        assert not [line for line in lines if "do not become payable" in line]

    async def live(self, events: list[tuple[Any, ...]]) -> None:
        left = [*FIRST, *events]
        while left:
            async with self.running() as (service, writer, streams):
                while left and left[0][0] != "restart":
                    event = left.pop(0)
                    # What the books refuse is told and changes nothing.
                    with suppress(ConfigError, LedgerError, ControlError):
                        await getattr(self, event[0])(service, writer, streams, *event[1:])
                left = left[1:]

    async def submit(self, service: HubService, writer: Writer, streams: Any, trainer: str, steps: int) -> None:
        self.submissions += 1
        wanted = replace(spec(2, submission=f"s{self.submissions}", csr="csr"), steps=steps, micro_batches=1)
        who = Principal(kind=Who.TRAINER, subject=trainer, account=trainer, scopes=scopes_of(Who.TRAINER))
        told = await asyncio.gather(*(service.submit_job(who, wanted) for _ in range(2)))
        assert told[0] == told[1]
        self.jobs.append((told[0][0], trainer))
        self.fees[told[0][0]] = self.fee_per_mille

    def key(self, job: int, step: int, rank: int) -> tuple[UnitKey, str]:
        job_id, trainer = self.jobs[job % len(self.jobs)]
        return UnitKey(job_id=job_id, epoch=Epoch(1), step=step, rank=Rank(rank)), trainer

    async def node_of(self, writer: Writer, key: UnitKey) -> NodeId:
        place = await writer.read(lambda books: books.find_place(key.job_id, key.epoch, key.rank))
        assert place is not None
        return place.node_id

    async def claim(
        self, service: HubService, writer: Writer, streams: Any, job: int, step: int, rank: int, size: int
    ) -> None:
        key, _ = self.key(job, step, rank)
        stream = streams[await self.node_of(writer, key)]
        self.batches += 1
        service.node_said(stream, Claims(batch=self.batches, units=(Unit(key=key, micro_batches=size),)))
        await until(lambda: self.batches in stream.answered, what="the claim is booked")
        self.first.setdefault(("claim", key), size)

    async def receive(
        self, service: HubService, writer: Writer, streams: Any, job: int, step: int, rank: int, size: int
    ) -> None:
        key, trainer = self.key(job, step, rank)
        who = Principal(kind=Who.TRAINER, subject=trainer, account=trainer, scopes=scopes_of(Who.TRAINER))
        await service.report_units(who, [Unit(key=key, micro_batches=size)] * 2)
        self.first.setdefault(("receive", key), size)

    async def deposit(self, service: Any, writer: Writer, streams: Any, trainer: str, receipt: int, micro: int) -> None:
        clerk = self.clerk
        await writer.submit(lambda books: cashier.deposit(books, clerk, trainer, micro, f"r{receipt}"))

    async def end(self, service: HubService, writer: Writer, streams: Any, job: int, state: JobState) -> None:
        job_id, trainer = self.jobs[job % len(self.jobs)]
        who = Principal(kind=Who.TRAINER, subject=trainer, account=trainer, scopes=scopes_of(Who.TRAINER))
        await service.end_job(who, job_id, state, "as told")

    async def time(self, service: HubService, writer: Writer, streams: Any, seconds: int) -> None:
        if seconds > 0:
            self.clock.advance(seconds)
        else:
            self.clock.jump_wall(seconds)
        at = int(self.clock.now())
        await writer.submit(lambda books: money.settle(books, at))  # also what the service does within a minute

    async def pay(self, service: Any, writer: Writer, streams: Any, node: NodeId, number: int, micro: Any) -> None:
        clerk = self.clerk
        await writer.submit(lambda books: cashier.make_payouts(books, clerk, node, micro, f"po_{number}"))

    async def answer(self, service: Any, writer: Writer, streams: Any, number: int, paid: bool) -> None:
        clerk = self.clerk
        await writer.submit(lambda books: cashier.end_payout(books, clerk, f"po_{number}", paid=paid))

    async def check(
        self, service: Any, writer: Writer, streams: Any, job: int, step: int, rank: int, good: bool | None
    ) -> None:
        key, trainer = self.key(job, step, rank)
        node_id, at = await self.node_of(writer, key), int(self.clock.now())

        def run(books: Any) -> None:
            ledger = Ledger(books=books, policy=books.policy())
            if good is None:
                ledger.hold(key, node_id, at=at)
            else:
                ledger.decide(key, trainer, node_id, good=good, at=at)

        await writer.submit(run)

    async def terms(self, service: Any, writer: Writer, streams: Any, deposits: bool, fee: int) -> None:
        policy = Policy(deposits=deposits, fee_per_mille=fee, micro_per_micro_batch=PRICE, challenge_seconds=WINDOW)
        await writer.submit(lambda books: cashier.set_terms(books, self.clerk, policy))
        self.fee_per_mille = fee

    @property
    def clerk(self) -> Clerk:
        return Clerk(actor="operator", now=int(self.clock.now()))

    def credited(self) -> dict[UnitKey, tuple[int, int]]:
        """Amount and fee of each unit of which both sides first said the same."""
        agreed = {}
        for (what, key), size in self.first.items():
            if what == "claim" and self.first.get(("receive", key)) == size:
                agreed[key] = (size * PRICE, size * PRICE * self.fees[key.job_id] // 1000)
        return agreed

    def look(self) -> None:
        agreed = self.credited()
        with self.store.reading() as books:
            places = {key: books.find_place(key.job_id, key.epoch, key.rank).node_id for key in agreed}
            assert totals(books).total == 0
            for account, amount in books.account_balances().items():
                assert amount >= 0 or account in MAY_BE_NEGATIVE, (account, amount)
            for node_id in NODES:
                due = sum(amount - fee for key, (amount, fee) in agreed.items() if places[key] == node_id)
                there = node_money(books, node_id)
                parts = there.pending + there.held + there.payable + there.clearing + there.paid + there.void
                assert there.credited == parts == due == books.earnings(node_id).confirmed_micro
            for job_id, _ in self.jobs:
                mine = [one for key, one in agreed.items() if key.job_id == job_id]
                cost = job_cost(books, job_id)
                assert (cost.units, cost.spent) == (len(mine), sum(amount for amount, _ in mine))
                assert cost.fees == sum(fee for _, fee in mine)


def prepared(store: Store) -> Hub:
    with store.transaction() as books:
        clerk = Clerk(actor="operator", now=0)
        for name in TRAINERS:
            add_account(books, clerk, name, frozenset({KeyKind.TRAINER}))
        for node_id in NODES:
            one = replace(info(node_id.replace("_", "-"), slots=100), node_id=node_id)
            books.save_node(NodeRecord(node_id=node_id, secret_hash=node_id, info=one))
        books.save_policy(Policy(micro_per_micro_batch=PRICE, challenge_seconds=WINDOW))
    return Hub(store=store, clock=FakeClock(now=20_000.0 * DAY))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_any_order_in_sqlite(tmp_path: Path, events: list[tuple[Any, ...]]) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    with closing(SqliteStore(tmp_path / "hub.sqlite")) as store:
        hub = prepared(store)
        asyncio.run(hub.live(events))
        hub.look()


@settings(max_examples=6, deadline=None)
@given(events=EVENTS)
def test_any_order_in_postgresql(postgres: PostgresServer, events: list[tuple[Any, ...]]) -> None:
    with closing(postgres.store()) as store:
        hub = prepared(store)
        asyncio.run(hub.live(events))
        hub.look()


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
@pytest.mark.timeout(3600)
def test_any_order_many_times(tmp_path: Path, events: list[tuple[Any, ...]]) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    with closing(SqliteStore(tmp_path / "hub.sqlite")) as store:
        hub = prepared(store)
        asyncio.run(hub.live(events))
        hub.look()


def test_the_look_finds_what_is_planted(tmp_path: Path) -> None:
    events = [("claim", 0, 0, 0, 1), ("receive", 0, 0, 0, 1)]
    with closing(SqliteStore(tmp_path / "hub.sqlite")) as store:
        hub = prepared(store)
        asyncio.run(hub.live(events))
        assert [amount for amount, _ in hub.credited().values()] == [PRICE]
        hub.look()
        store._connection.execute("UPDATE moved SET amount = amount + 1 WHERE account = 'platform'")
        store._connection.execute("UPDATE balances SET amount = amount + 1")
        with pytest.raises(AssertionError):
            hub.look()
