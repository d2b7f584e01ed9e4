"""The hub at work: the state machine between the wire, the books and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from distensor.comm.address import host_of_peer, is_loopback
from distensor.comm.messages import Claims, ClaimsAnswer, Goodbye, Heartbeat, NodeToHub, Register, Rejected, Welcome
from distensor.comm.server import Bearer, NodeSession, Principal
from distensor.core.clock import Clock
from distensor.core.control import (
    JobSpec,
    JobState,
    JobUpdate,
    Mesh,
    Reconfiguration,
    TakeOver,
    Terms,
    Unit,
    WorkerChange,
    WorkerReady,
)
from distensor.core.errors import ConfigError, HubProtocolError, JobHeldError, LedgerError, StoreError
from distensor.core.ids import AccountId, Epoch, JobId, NodeId
from distensor.core.job_report import JobQuery, JobReport, JobsPage
from distensor.core.parallel import ParallelConfig
from distensor.core.progress import StepProgress
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery, hour_of
from distensor.hub import access, jobs, money
from distensor.hub.accounts import quotas_of
from distensor.hub.audit import Outcome
from distensor.hub.authorization import Operation, Reach, Who
from distensor.hub.door import Door, Stay, actor_of, principal_of_node, reach_of, usable_key
from distensor.hub.effects import (
    Disconnect,
    Effect,
    Note,
    Publish,
    Save,
    SaveInfo,
    SaveJob,
    SaveRank,
    Send,
    SessionId,
    SpendToken,
)
from distensor.hub.ledger_queries import job_cost
from distensor.hub.machine import HubMachine
from distensor.hub.metering import Recorded, describe, never_placed, record_claims, record_receipts
from distensor.hub.objections import record_objections
from distensor.hub.records import NodeRecord
from distensor.hub.repository import Books
from distensor.hub.runs import Runs
from distensor.hub.watchers import Watchers
from distensor.hub.writer import Writes

T = TypeVar("T")

TICK_SECONDS = 0.5
SETTLE_SECONDS = 60.0
RETURN_SECONDS = 6.0
"""How long a hub that has just begun leaves the trainers of its jobs to come back, before others take them over."""
_SAVES = (SaveInfo, SaveJob, SaveRank, SpendToken)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mint:
    """Where new names and secrets come from; tests bring their own."""

    node_id: Callable[[], NodeId]
    secret: Callable[[], str]


class HubService:
    """A `comm.server.ControlService`. All methods run in one event loop. `hubs`: its addresses, if it has several.

    Every event goes to the machine; the records among its effects are committed, and only then the rest of its
    effects are delivered, in the order of the events.
    """

    def __init__(
        self,
        machine: HubMachine,
        writer: Writes,
        clock: Clock,
        mint: Mint,
        log: Callable[[str], None],
        door: Door | None = None,
        *,
        hubs: tuple[str, ...] = (),
    ) -> None:
        self._machine = machine
        self._door = door or Door(machine.node, writer, clock)
        self._writer = writer
        self._clock = clock
        self._mint = mint
        self._log = log
        self._hubs = hubs
        self._since = clock.monotonic()
        self._followed: set[JobId] = set()
        self._submitting = asyncio.Lock()
        self._terms: Terms | None = None
        self._sessions: dict[SessionId, NodeSession] = {}
        self._ids: dict[NodeSession, SessionId] = {}
        self._next_session = 0
        self._stays: dict[NodeSession, Stay] = {}
        self._watchers = Watchers()
        self.runs = Runs()
        self._undelivered = 0
        self._deliveries: asyncio.Queue[tuple[asyncio.Future[Any], Callable[[], None]]] = asyncio.Queue()

    async def run(self) -> None:
        """Deliver and watch the time, until cancelled.

        Raises:
            Exception: a record could not be written for a reason that trying again does not cure: a defect.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver())
            tasks.create_task(self._tick())
            tasks.create_task(self._hear_of_changes())
            tasks.create_task(self._settle())

    async def _deliver(self) -> None:
        while True:
            committed, deliver = await self._deliveries.get()
            if not committed.done():
                await asyncio.wait([committed])
            deliver()
            self._undelivered -= 1

    def _deliver_once_committed(self, committed: asyncio.Future[Any], deliver: Callable[[], None]) -> None:
        """Units wait for the disk beside the other deliveries: heartbeats are answered while it is full."""
        committed.add_done_callback(lambda _: self._put(committed, deliver))

    def _put(self, committed: asyncio.Future[Any], deliver: Callable[[], None]) -> None:
        self._undelivered += 1
        self._deliveries.put_nowait((committed, deliver))

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep_async(TICK_SECONDS)
            if effects := self._machine.tick(self._clock.monotonic()):
                self._apply(effects)

    async def _settle(self) -> None:
        """Credits become payable, and escrows of ended jobs go back, by the hub's clock."""
        while True:
            at = int(self._clock.now())
            try:
                matured, terms = await self._writer.submit(lambda books: money.settled(books, at))  # noqa: B023  # awaited
            except LedgerError as error:  # nothing has changed; work goes on, and somebody has to look at it
                self._log(f"credits do not become payable: {error}")
            else:
                self._terms = terms
                if matured:
                    self._log(f"the credits of {len(matured)} nodes became payable")
            await self._clock.sleep_async(SETTLE_SECONDS)

    async def _hear_of_changes(self) -> None:
        """Beside `_tick`: time goes on while the books do not answer. Until they do, accounts and keys are as known."""
        changed = False
        while True:
            await self._clock.sleep_async(TICK_SECONDS)
            with contextlib.suppress(StoreError):  # the database is away; it is asked again in a moment
                changed = await self._door.refresh() or changed
                if changed:
                    accounts = await self._writer.read(lambda books: books.accounts())
                    self._machine.set_quotas(quotas_of(accounts))
                    self._terms = money.terms_of(await self._writer.read(lambda books: books.policy()))
                    changed = False

    # Who is there

    async def authenticate(self, bearer: Bearer, peer: str) -> Principal:
        return await self._door.recognise(bearer, peer)

    # Nodes

    async def node_joined(self, who: Principal, register: Register, session: NodeSession) -> None:
        self._door.require(who, Operation.NODE)
        host = host_of_peer(session.peer)
        seen = replace(register.info, seen_host="" if is_loopback(host) else host)
        register = replace(register, info=seen)
        node_id, credential = NodeId(who.subject), ""
        if who.kind != Who.NODE:
            node_id, credential = await self._admit(who, register)
        node = self._machine.node(node_id)
        assert node is not None  # its credential was recognised, or it has just been admitted
        welcome = Welcome(
            node_id=node_id,
            credential=credential,
            generation=self._machine.generation,
            heartbeat_seconds=self._machine.heartbeat,
            hubs=self._hubs,
        )
        session.send(welcome)
        self._next_session += 1
        number = SessionId(self._next_session)
        self._sessions[number] = session
        self._ids[session] = number
        self._stays[session] = self._door.enter(principal_of_node(node), functools.partial(self._show_out, session))
        self._apply(self._machine.join(number, node_id, register, self._clock.monotonic()))

    def _show_out(self, session: NodeSession, why: str) -> None:
        """Nothing more is heard from this node, whether it reads the reason or not."""
        session.close(Rejected(code="revoked", reason=why))
        self.node_left(session)

    async def _admit(self, who: Principal, register: Register) -> tuple[NodeId, str]:
        joining = access.Joining(
            info=register.info, host=who.host, node_id=self._mint.node_id(), credential=self._mint.secret()
        )
        if who.kind == Who.PROVIDER:
            run = self._admit_by_key(who, joining)
        else:
            run = functools.partial(access.admit, token_hash=who.subject, joining=joining)
        record = await self._writer.submit(lambda books: run(books))
        self._machine.add_node(record, self._clock.monotonic())
        self._door.note(actor_of(who), "join", record.node_id, Outcome.DONE, f"node {register.info.name}")
        return record.node_id, joining.credential

    def _admit_by_key(self, who: Principal, joining: access.Joining) -> Callable[[Books], NodeRecord]:
        named = joining.info.node_id
        known = None if named is None else self._machine.node(named)
        former = named if known is not None and known.account == who.account else None
        now = int(self._clock.now())

        def run(books: Books) -> NodeRecord:
            key = usable_key(books, who.subject, now)  # again, in the same transaction: it may just have been revoked
            by = access.JoinKey(secret_hash=who.subject, family=key.family, account=key.account_id)
            return access.admit_by_key(books, by, joining, former)

        return run

    def node_said(self, session: NodeSession, message: NodeToHub) -> None:
        number = self._ids.get(session)
        if number is None:
            return
        match message:
            case Heartbeat():
                now, hub_time = self._clock.monotonic(), self._clock.now()
                self._apply(self._machine.beat(number, message, now, hub_time))
            case WorkerReady():
                self._apply(self._machine.worker_ready(number, message))
            case WorkerChange():
                self._apply(self._machine.worker_changed(number, message))
            case Claims():
                self._claim(number, message)
            case Goodbye():
                session.close()
            case Register():
                raise HubProtocolError("a second Register on the same stream")

    def _claim(self, number: SessionId, claims: Claims) -> None:
        node_id = self._machine.node_of(number)
        if node_id is None:
            return
        hour = hour_of(self._clock.now())
        recorded = self._writer.submit(lambda books: record_claims(books, node_id, claims.units, hour=hour))

        def done() -> None:
            self._booked(recorded.result())
            self._send(Send(session=number, message=ClaimsAnswer(batch=claims.batch)))

        self._deliver_once_committed(recorded, done)

    def node_left(self, session: NodeSession) -> None:
        if stay := self._stays.pop(session, None):
            self._door.leave(stay)
        number = self._ids.pop(session, None)
        if number is not None:
            del self._sessions[number]
            self._apply(self._machine.leave(number, self._clock.monotonic()))

    async def statement(self, who: Principal, query: StatementQuery) -> Statement:
        self._door.require(who, Operation.STATEMENT)
        return await self._writer.read(lambda books: books.statement(NodeId(who.subject), query))

    async def units(self, who: Principal, query: UnitsQuery) -> UnitsPage:
        self._door.require(who, Operation.UNITS)
        return await self._writer.read(lambda books: books.units(NodeId(who.subject), query))

    # Trainers

    async def query_mesh(self, who: Principal) -> Mesh:
        self._door.require(who, Operation.QUERY_MESH)
        return replace(self._machine.mesh(self._clock.monotonic()), terms=self._terms)

    async def submit_job(self, who: Principal, spec: JobSpec) -> tuple[JobId, Epoch]:
        self._door.require(who, Operation.SUBMIT_JOB)
        self._writer.require_writable()
        async with self._submitting:  # else a repeated one would set its money aside a second time
            job_id, epoch, effects = await self._submit(who.account, spec)
        await self._apply(effects)
        return job_id, epoch

    async def _submit(self, owner: str, spec: JobSpec) -> tuple[JobId, Epoch, list[Effect]]:
        """The quote is set aside first, so that no job is placed which is not covered."""
        if (known := self._machine.submitted(owner, spec.submission)) is not None:
            return *known, []
        job_id, at = self._machine.new_job_id(), int(self._clock.now())
        begun = self._writer.submit(lambda books: money.begin_job(books, job_id, owner, spec, at))
        try:
            terms = await begun
            return self._machine.submit(owner, spec, self._clock.monotonic(), job_id, terms)
        except BaseException:  # a caller who is gone included; what became of it goes on upwards
            self._writer.submit(lambda books: money.give_back(books, job_id, at))
            raise

    async def reconfigure_job(self, who: Principal, change: Reconfiguration) -> Epoch:
        owner = self._owner(who, Operation.RECONFIGURE_JOB, change.job_id)
        epoch, effects = self._machine.reconfigure(owner, change, self._clock.monotonic())
        await self._apply(effects)
        return epoch

    async def take_over_job(self, who: Principal, taken: TakeOver) -> tuple[Epoch, ParallelConfig]:
        owner = self._owner(who, Operation.TAKE_OVER_JOB, taken.job_id)
        job = self._machine.job_of(owner, taken.job_id)
        here = self._watchers.count(job.job_id) > 0
        young = self._clock.monotonic() - self._since < RETURN_SECONDS and job.job_id not in self._followed
        if job.request != taken.request and (here or young):
            why = "its trainer is connected" if here else "this hub has just begun, and its trainer may still come back"
            raise JobHeldError(f"job {job.job_id}: {why}; end that process, then take the job over")
        epoch, effects = self._machine.take_over(owner, taken, self._clock.monotonic())
        await self._apply(effects)
        return epoch, job.parallel

    async def watch_job(self, who: Principal, job_id: JobId) -> AsyncIterator[JobUpdate]:
        job = self._machine.job_of(self._owner(who, Operation.WATCH_JOB, job_id), job_id)
        self._followed.add(job_id)
        with self._watchers.watch(job_id) as watcher, self._door.staying(who, watcher.end):
            # Goes through the deliveries, so that a watcher never sees what is not committed yet.
            self._apply([self._machine.update(job)])
            while True:
                self._machine.heard_trainer(job_id, self._clock.monotonic())
                update = await watcher.next(within=TICK_SECONDS * 10)
                if update is None:
                    continue
                yield update
                if update.state.ended:
                    return

    async def report_units(self, who: Principal, units: Sequence[Unit], different: Sequence[Unit] = ()) -> None:
        self._door.require(who, Operation.REPORT_UNITS)
        for key in {unit.key.job_id: unit.key for unit in (*units, *different)}.values():
            if (owner := self._machine.owner_of(key.job_id)) is not None:  # the books have the last word
                missing = never_placed(key)
                self._door.require_object(who, Operation.REPORT_UNITS, key.job_id, owner, missing)
        self._writer.require_writable()  # the trainer keeps them and comes again
        now = int(self._clock.now())

        def record(books: Books) -> Recorded:
            recorded = record_receipts(books, who.account, units, hour=hour_of(now))
            record_objections(books, who.account, different, at=now)
            return recorded

        recorded = self._writer.submit(record)
        delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if recorded.exception() is None:
                self._booked(recorded.result())
                self._note_objections(different)
            if not delivered.done():
                delivered.set_result(None)

        self._deliver_once_committed(recorded, done)
        await delivered
        recorded.result()  # raises what was wrong with the receipts
        for job_id in {unit.key.job_id for unit in (*units, *different)}:
            self._machine.heard_trainer(job_id, self._clock.monotonic())

    async def report_progress(self, who: Principal, job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress]) -> None:
        self._owner(who, Operation.REPORT_PROGRESS, job_id)
        self.runs.tell(job_id, epoch, steps, self._clock.now())

    def _note_objections(self, different: Sequence[Unit]) -> None:
        for unit in different:
            self._log(f"a spot check differs: {describe(unit.key)}; the work of its node in the job is held")

    async def end_job(
        self, who: Principal, job_id: JobId, state: JobState, reason: str, epoch: Epoch | None = None
    ) -> None:
        owner = self._owner(who, Operation.END_JOB, job_id)
        try:
            effects = self._machine.end(owner, job_id, state, reason, epoch)
        except ConfigError as error:
            raise HubProtocolError(str(error)) from error
        if who.account != owner:
            self._door.note(actor_of(who), Operation.END_JOB, job_id, Outcome.DONE, f"job of {owner}: {state.value}")
        await self._apply(effects)

    async def list_jobs(self, who: Principal, query: JobQuery) -> JobsPage:
        self._door.require(who, Operation.LIST_JOBS)
        owner = None if reach_of(who, Operation.LIST_JOBS) is Reach.ANY else who.account
        return jobs.page_of(self._machine.summaries(owner, ended=query.ended), query)

    async def explain_job(self, who: Principal, job_id: JobId) -> JobReport:
        self._owner(who, Operation.EXPLAIN_JOB, job_id)
        report = self._machine.report(job_id, self._clock.monotonic())
        cost = await self._writer.read(lambda books: job_cost(books, job_id))
        return replace(report, cost=cost)

    def _owner(self, who: Principal, operation: Operation, job_id: JobId) -> AccountId:
        missing = f"the hub knows no job {job_id}"
        return self._door.require_object(who, operation, job_id, self._machine.owner_of(job_id), missing)

    # Effects

    def _apply(self, effects: Iterable[Effect]) -> asyncio.Future[None]:
        """Commit the records, then deliver the rest. The future is done after the delivery."""
        effects = list(effects)
        saves = [effect for effect in effects if isinstance(effect, _SAVES)]
        others = [effect for effect in effects if not isinstance(effect, _SAVES)]
        if not saves and not self._undelivered:  # nothing is before it: most heartbeats
            for effect in others:
                self._perform(effect)
            return _nothing()
        delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def deliver() -> None:
            committed.result()  # an error here is a defect, and ends the hub rather than its promises
            for effect in others:
                self._perform(effect)
            if not delivered.done():
                delivered.set_result(None)

        at = int(self._clock.now())
        committed = self._writer.submit(lambda books: save_all(books, saves, at)) if saves else _nothing()
        self._put(committed, deliver)
        return delivered

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Publish():
                self._watchers.publish(effect.update)
                self.runs.wake(effect.update.job_id)
            case Disconnect():
                self._disconnect(effect)
            case Note():
                self._log(effect.text)

    def _send(self, send: Send) -> None:
        if session := self._sessions.get(send.session):
            session.send(send.message)

    def _disconnect(self, effect: Disconnect) -> None:
        if session := self._sessions.pop(effect.session, None):
            self._ids.pop(session, None)
            session.close(effect.why)

    def _booked(self, recorded: Recorded) -> None:
        for node_id, earnings in recorded.earnings.items():
            self._machine.set_earnings(node_id, earnings)
        for line in recorded.refused:
            self._log(f"refused a claim: {line}")

    def stop(self) -> None:
        """Tell every node that the hub is going, so that they do not wait for silence."""
        for session in self._sessions.values():
            session.close(Rejected(code="stopping", reason="the hub is stopping"))


def _nothing() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def save_all(books: Books, saves: Iterable[Save], at: int) -> None:
    """Write the records among a machine's effects; a job that ends gives back what was set aside for it."""
    for save in saves:
        if isinstance(save, SaveJob) and save.job.state.ended:
            money.end_job(books, save.job.job_id, save.job.price, at)
        match save:
            case SaveInfo():
                books.save_info(save.node_id, save.info)
            case SaveJob(new=True):
                books.insert_job(save.job)
            case SaveJob(new_epoch=True):
                books.begin_epoch(save.job)
            case SaveJob():
                books.update_job(save.job)
            case SaveRank():
                books.save_rank(save.job_id, save.epoch, save.rank)
            case SpendToken():
                books.spend_token(save.node.node_id)
