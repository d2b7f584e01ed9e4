"""A month of many providers through the real machine, service, store and the supervisor's own books, by a fake clock.

Statements, ledger, the providers' own accounts and the trainers' costs agree to the micro-credit, and all of them with
what this file counted for itself.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import info, spec, until
from machine_kit import FakeSigner

from distensor.comm.keys import KeyKind
from distensor.comm.messages import Claims, ClaimsAnswer, Heartbeat, HubToNode, Register
from distensor.comm.server import NodeSession, Principal
from distensor.core.control import JobState, Unit, UnitKey
from distensor.core.errors import PlacementError
from distensor.core.ids import AccountId, JobId, NodeId, Rank, new_job_id, new_node_id
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery
from distensor.hub import cashier
from distensor.hub.administration import Clerk, add_account
from distensor.hub.authorization import Who, scopes_of
from distensor.hub.hashing import new_secret
from distensor.hub.ledger.accounts import DAY, Ledger, Policy
from distensor.hub.ledger.statements import By
from distensor.hub.ledger_queries import (
    PayoutStanding,
    accounts_named,
    job_cost,
    node_accounts,
    node_money,
    payouts,
    statement,
    totals,
    trainer_money,
)
from distensor.hub.machine import HubMachine, Patience
from distensor.hub.records import NodeRecord
from distensor.hub.service import HubService, Mint
from distensor.hub.stores.sqlite import SqliteStore
from distensor.hub.writer import Writer
from distensor.testing.clock import FakeClock
from distensor_server.income.book import AccountBook
from distensor_server.income.sync import Synchroniser

pytestmark = pytest.mark.asyncio
EVER = 1e9
RANKS = 3
WINDOW = DAY // 2
TRAINERS = ("ann", "bob", "cid")
PATIENCE = Patience(heartbeat=EVER, node_gone=EVER, workers_ready=EVER, trainer_gone=EVER, passed_over=EVER)


class Stream(NodeSession):
    """A node's, which keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("ipv4:127.0.0.1:1")
        self.answered: set[int] = set()

    def send(self, message: HubToNode) -> None:
        if isinstance(message, ClaimsAnswer):
            self.answered.add(message.batch)


@dataclass
class Provider:
    """A node and its own account; a `sync.AccountSource` of its hub."""

    node_id: NodeId
    stream: Stream
    service: HubService
    book: AccountBook
    batches: int = 0

    @property
    def who(self) -> Principal:
        return Principal(kind=Who.NODE, subject=self.node_id)

    async def statement(self, query: StatementQuery) -> Statement:
        return await self.service.statement(self.who, query)

    async def units(self, query: UnitsQuery) -> UnitsPage:
        return await self.service.units(self.who, query)

    async def claim(self, units: list[Unit], *, now: float) -> None:
        self.book.claimed([(unit, now) for unit in units])
        await self.claim_again(units)

    async def claim_again(self, units: list[Unit]) -> None:
        self.batches += 1
        self.service.node_said(self.stream, Claims(batch=self.batches, units=tuple(units)))
        await until(lambda: self.batches in self.stream.answered, what="the claims are booked")


@dataclass(frozen=True)
class Credited:
    """What this file knows of a unit that both sides told alike."""

    node_id: NodeId
    trainer: str
    job_id: JobId
    amount: int
    fee: int


@dataclass
class Month:
    service: HubService
    writer: Writer
    clock: FakeClock
    providers: dict[NodeId, Provider]
    dice: random.Random
    machine: HubMachine
    credited: dict[UnitKey, Credited] = field(default_factory=dict)
    void: set[UnitKey] = field(default_factory=set)
    jobs: list[JobId] = field(default_factory=list)
    deposited: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    number: int = 0

    def who(self, trainer: str) -> Principal:
        return Principal(kind=Who.TRAINER, subject=trainer, account=trainer, scopes=scopes_of(Who.TRAINER))

    @property
    def clerk(self) -> Clerk:
        return Clerk(actor="operator", now=int(self.clock.now()))

    async def one_job(self) -> None:
        self.number += 1
        trainer, dice = self.dice.choice(TRAINERS), self.dice
        steps, size = dice.randint(1, 6), dice.randint(1, 4)
        wanted = replace(
            spec(RANKS, submission=f"s{self.number}", csr="csr"),
            steps=dice.choice([steps, steps, 2 * steps, max(1, steps // 2)]),  # as planned, ended early, or too long
            micro_batches=size,
        )
        terms = await self.writer.read(lambda books: books.policy())
        while True:
            try:
                job_id, epoch = await self.service.submit_job(self.who(trainer), wanted)
                break
            except PlacementError as error:
                if "more are needed" not in str(error):
                    raise
                self.refused += 1
                await self.deposit(trainer, dice.randint(1, 40_000))
        self.jobs.append(job_id)
        places = [rank.node_id for rank in self.machine.job_of(trainer, job_id).ranks]
        claims: dict[NodeId, list[Unit]] = {}
        receipts: list[Unit] = []
        for step in range(steps):
            for rank, node_id in enumerate(places):
                key = UnitKey(job_id=job_id, epoch=epoch, step=step, rank=Rank(rank))
                fate = dice.random()
                if fate > 0.04:
                    claims.setdefault(node_id, []).append(Unit(key=key, micro_batches=size))
                if not 0.04 < fate < 0.08:
                    received = size + 1 if 0.08 < fate < 0.1 else size
                    receipts.append(Unit(key=key, micro_batches=received))
                if fate >= 0.1:
                    amount = size * terms.micro_per_micro_batch
                    fee = terms.fee_of(amount)
                    self.credited[key] = Credited(node_id, trainer, job_id, amount, fee)
        told = [self._claims(node_id, units) for node_id, units in claims.items()]
        told += [self.service.report_units(self.who(trainer), receipts) for _ in range(dice.choice([1, 1, 2]))]
        state = dice.choice([JobState.FINISHED, JobState.FAILED, JobState.CANCELLED])
        told.append(self.service.end_job(self.who(trainer), job_id, state, "as told"))
        dice.shuffle(told)
        for one in told:
            await one

    async def _claims(self, node_id: NodeId, units: list[Unit]) -> None:
        await self.providers[node_id].claim(units, now=self.clock.now())
        if self.dice.random() < 0.3:
            await self.providers[node_id].claim_again(units[::-1])

    async def deposit(self, trainer: str, micro: int) -> None:
        key = f"r{self.number}-{self.refused}"
        for _ in range(2):
            await self.writer.submit(lambda books: cashier.deposit(books, self.clerk, trainer, micro, key))
        self.deposited[trainer] += micro

    async def check_some(self) -> None:
        """Some units of today are held; some of these were good after all, some void, some wait for ever."""
        at = int(self.clock.now())
        for key in self.dice.sample(sorted(self.credited), k=min(2, len(self.credited))):
            one, word = self.credited[key], self.dice.choice(["good", "bad", "open"])

            def check(books: Any, key: UnitKey = key, one: Credited = one, word: str = word) -> str:
                ledger = Ledger(books=books, policy=books.policy())
                name = f"{key.job_id}/{key.epoch}/{key.step}/{key.rank}"
                if books.find_transfer(f"hold/{name}") is None:
                    hour = books.find_transfer(f"unit/{name}").hour
                    if hour < books.open_hour():
                        return "late"
                    ledger.hold(key, one.node_id, at=at)
                    if word != "open":
                        ledger.decide(key, one.trainer, one.node_id, good=word == "good", at=at)
                    return word
                return "known"

            if await self.writer.submit(check) == "bad":
                self.void.add(key)

    async def pay_some(self) -> None:
        for node_id in self.dice.sample(sorted(self.providers), k=len(self.providers) // 2):
            paid = self.dice.choice([True, True, False, None])

            def pay(books: Any, node_id: NodeId = node_id, paid: bool | None = paid) -> None:
                if books.balance(f"payable:{node_id}") > 0:
                    (made,) = cashier.make_payouts(books, self.clerk, node_id)
                    if paid is not None:
                        cashier.end_payout(books, self.clerk, made.payout_id, paid=paid)

            await self.writer.submit(pay)

    async def one_day(self, jobs: int) -> None:
        for _ in range(jobs):
            await self.one_job()
        await self.check_some()
        await self.pay_some()
        self.clock.advance(DAY)
        due = (int(self.clock.now()) - WINDOW) // 3600
        while await self.writer.read(lambda books: books.open_hour()) < due:  # noqa: ASYNC110  # the service's own look
            await asyncio.sleep(0.001)


@asynccontextmanager
async def month(path: Path, providers: int, seed: int) -> AsyncIterator[Month]:
    clock = FakeClock(now=20_000.0 * DAY)
    with closing(SqliteStore(path / "hub.sqlite")) as store:
        with store.transaction() as books:
            generation = books.begin_generation()
            clerk = Clerk(actor="operator", now=0)
            for name in TRAINERS:
                add_account(books, clerk, name, frozenset({KeyKind.TRAINER}))
            add_account(books, clerk, "owners", frozenset({KeyKind.PROVIDER}))
            for number in range(providers):
                node_id = NodeId(f"n_{number}")
                one = replace(info(f"atlas-{number}", slots=50), node_id=node_id)
                books.save_node(NodeRecord(node_id=node_id, secret_hash=node_id, info=one, account=AccountId("owners")))
            snapshot = books.snapshot()
        machine = HubMachine(
            generation=generation,
            nodes=snapshot.nodes,
            jobs=(),
            submissions={},
            earnings={},
            signer=FakeSigner(),
            new_job_id=new_job_id,
            patience=PATIENCE,
            now=clock.monotonic(),
        )
        trouble: list[str] = []
        writer = Writer(store, clock, lambda error: trouble.append(str(error)))
        service = HubService(machine, writer, clock, Mint(node_id=new_node_id, secret=new_secret), trouble.append)
        working = asyncio.create_task(service.run())
        here: dict[NodeId, Provider] = {}
        for node in snapshot.nodes:
            stream, book = Stream(), AccountBook(path / f"{node.node_id}.sqlite")
            book.open()
            who = Principal(kind=Who.NODE, subject=node.node_id, account=node.account)
            await service.node_joined(who, Register(info=node.info, running=()), stream)
            service.node_said(stream, Heartbeat(sequence=1))
            here[node.node_id] = Provider(node_id=node.node_id, stream=stream, service=service, book=book)
        try:
            yield Month(
                service=service,
                writer=writer,
                clock=clock,
                providers=here,
                dice=random.Random(seed),
                machine=machine,
            )
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await writer.close()
            for provider in here.values():
                provider.book.close()
    assert not [line for line in trouble if "credits" in line and "became payable" not in line], trouble


async def live(path: Path, *, providers: int, days: int, jobs: int, seed: int) -> None:
    async with month(path, providers, seed) as here:
        for day in range(days):
            terms = Policy(
                deposits=day % 3 != 0,
                fee_per_mille=here.dice.choice([0, 77, 125]),
                micro_per_micro_batch=here.dice.choice([1000, 1001, 13]),
                challenge_seconds=WINDOW,
            )
            await here.writer.submit(lambda books, terms=terms: cashier.set_terms(books, here.clerk, terms))
            await here.one_day(jobs)
        for provider in here.providers.values():
            await _check_provider(here, provider)
        await here.writer.read(lambda books: _check_books(books, here))


async def _check_provider(here: Month, provider: Provider) -> None:
    """The provider's own account, the hub's statement to it, and what this file counted."""
    mine = {key: one for key, one in here.credited.items() if one.node_id == provider.node_id}
    due = sum(one.amount - one.fee for one in mine.values())
    lost: list[Unit] = []
    sync = Synchroniser(book=provider.book, source=provider, clock=here.clock, claim_again=lost.append)
    earnings = await sync.run()
    assert (earnings.confirmed_micro, earnings.confirmed_units, lost) == (due, len(mine), [])
    assert sum(row.micro for row in provider.book.statement()) == due
    assert sum(micro for _, micro in provider.book.own_sums().values()) == due
    money = sync.money
    assert money is not None
    there = money.pending + money.held + money.payable + money.clearing + money.paid + money.void
    assert money.credited == there == due
    void = [one for key, one in mine.items() if key in here.void]
    assert money.void == sum(one.amount - one.fee for one in void)
    assert money.fees == sum(one.fee for one in mine.values()) - sum(one.fee for one in void)


def _check_books(books: Any, here: Month) -> None:
    whole = totals(books)
    assert whole.total == 0
    costs = {job_id: job_cost(books, job_id) for job_id in here.jobs}
    for job_id, cost in costs.items():
        mine = [one for one in here.credited.values() if one.job_id == job_id]
        assert (cost.spent, cost.fees, cost.units) == (
            sum(one.amount for one in mine),
            sum(one.fee for one in mine),
            len(mine),
        )
        assert 0 <= cost.quoted - cost.refunded - cost.escrow <= cost.spent
    spent = sum(cost.spent for cost in costs.values())
    moneys = {node_id: node_money(books, node_id) for node_id in here.providers}
    assert spent == sum(one.credited for one in moneys.values()) + sum(cost.fees for cost in costs.values())
    for trainer in TRAINERS:
        assert trainer_money(books, trainer).deposited == here.deposited[trainer]
    paid = sum(one.paid for one in moneys.values())
    assert whole.groups.get("outside", 0) == paid - sum(here.deposited.values())
    groups: Counter[str] = Counter()
    for by in By:
        seen = {name: statement(books, accounts_named(books, name), by) for name in (*TRAINERS, "owners")}
        for lines in seen.values():
            sums: Counter[str] = Counter()
            for line in lines:
                sums[line.account] += line.micro
            for account, micro in sums.items():
                assert micro == books.balance(account), (by, account)
                groups[account.partition(":")[0]] += micro
    held = {group: amount for group, amount in whole.groups.items() if group not in ("outside", "platform", "clearing")}
    assert {group: amount // len(By) for group, amount in groups.items() if amount} == held
    for node_id in here.providers:
        lines = statement(books, node_accounts(node_id), By.DEVICE)
        assert sum(line.micro for line in lines if line.kind == "unit" and line.account.startswith("pending:")) == (
            moneys[node_id].credited
        )
    made = Counter(one.standing for one in payouts(books))
    fees = sum(cost.fees for cost in costs.values())
    print(
        f"\nproviders {len(here.providers)}, jobs {len(here.jobs)}, refused for lack of a deposit {here.refused}, "
        f"units {len(here.credited)}, void {len(here.void)}, payouts paid {made[PayoutStanding.PAID]}, failed "
        f"{made[PayoutStanding.FAILED]}, clearing {made[PayoutStanding.CLEARING]}\n"
        f"micro-credits: trainers spent {spent} = providers {spent - fees} + fees {fees}; deposits "
        f"{sum(here.deposited.values())}, paid out {paid}, lent by the platform {-whole.groups.get('platform', 0)}; "
        f"all accounts together {whole.total}"
    )
    assert paid > 0


async def test_some_days_of_a_few_providers(tmp_path: Path) -> None:
    await live(tmp_path, providers=4, days=5, jobs=4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_month_of_fifty_providers(tmp_path: Path) -> None:
    await live(tmp_path, providers=50, days=30, jobs=40, seed=random.randrange(1 << 32))
