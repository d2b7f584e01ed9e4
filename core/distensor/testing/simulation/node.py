"""A provider's machine: the real link to the hub, and a model of the supervisor's workers behind it.

What survives a kill is what the supervisor keeps in files: its credential, and the receipts of its claims.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distensor.comm.address import HubAddress
from distensor.comm.backoff import Backoff
from distensor.comm.link import NodeLink
from distensor.comm.link_status import LinkState, LinkStatus
from distensor.comm.link_stream import LinkStream
from distensor.comm.messages import Claims, ClaimsAnswer, HubToNode, JobRef, NodeToHub, Welcome
from distensor.comm.reach import Metadata, Stream
from distensor.core.control import (
    Assignment,
    Certificate,
    DeviceInfo,
    DeviceKind,
    Earnings,
    NodeInfo,
    Topology,
    Unit,
    UnitKey,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.ids import DeviceId, Epoch, JobId, Rank
from distensor.core.reading import Unavailable
from distensor.testing.simulation.checks import Checks
from distensor.testing.simulation.hub import AUTHORITY
from distensor.testing.simulation.loop import PartyClock
from distensor.testing.simulation.network import ADDRESS, Connection, Network
from distensor.testing.simulation.trace import Promise, Trace

DEVICE = DeviceId("cpu")
FAILURES_TO_BREAK = 5
SLOWEST_START = 3.0
ODDS_OF_A_BAD_START = 0.3
SLOWEST_END = 1.0
_UNKNOWN = Unavailable(reason="a simulated machine")


class _NoChannel:
    async def close(self, grace: None) -> None:
        """There is no channel: a connection is all there is."""


class _TappedStream(LinkStream):
    """The real stream on a simulated call; the checks see what goes through."""

    def __init__(self, connection: Connection, machine: str, checks: Checks, admitted: Callable[[], None]) -> None:
        super().__init__(ADDRESS, _NoChannel(), connection)  # type: ignore[arg-type]  # nothing but close is asked of it
        self._admitted = admitted
        self._machine = machine
        self._checks = checks
        self._batches: dict[int, tuple[Unit, ...]] = {}

    async def write(self, message: NodeToHub) -> None:
        if isinstance(message, WorkerReady):
            self._checks.node_said_ready(message)
        elif isinstance(message, Claims):
            self._batches[message.batch] = message.units
            for unit in message.units:
                self._checks.node_claims(self._machine, unit)
        await super().write(message)

    async def read(self, *, within: float) -> HubToNode | None:
        message = await super().read(within=within)
        if isinstance(message, Welcome) and message.credential:
            self._admitted()
        if message is not None:
            batch = self._batches.get(message.batch, ()) if isinstance(message, ClaimsAnswer) else ()
            self._checks.node_heard(self._machine, message, batch)
        return message


class SimulatedReach:
    """The way of one machine to the hub, over the simulated network."""

    def __init__(self, network: Network, machine: str, checks: Checks, admitted: Callable[[], None]) -> None:
        self._admitted = admitted
        self._network = network
        self._machine = machine
        self._checks = checks

    def authority(self, address: HubAddress, fingerprint: str, seconds: float) -> str:
        return AUTHORITY

    async def open(
        self, address: HubAddress, authority_pem: str, metadata: Metadata, seconds: float | None = None
    ) -> Stream:
        connection = await self._network.connect(
            self._machine, metadata, lambda servicer, context: servicer.Node(None, context)
        )
        return _TappedStream(connection, self._machine, self._checks, self._admitted)


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """A process of one rank. `ref` is what its supervisor takes it for, `entered` the place where it trains."""

    ref: JobRef
    state: WorkerState = WorkerState.STARTING
    restarts: int = 0
    failures: int = 0
    listening: bool = False
    granted: Epoch | None = None
    entered: JobRef | None = None
    ending: bool = False
    process: int = 0
    """Counts the processes of this worker: what one held, the next does not."""

    @property
    def wanted(self) -> bool:
        return not self.ending and self.state is not WorkerState.EXITED


@dataclass(slots=True)
class Kept:
    """The files of a supervisor."""

    claims: dict[UnitKey, Unit] = field(default_factory=dict)


class SimulatedNode:
    """One machine. `start` and `kill` are its supervisor's process."""

    def __init__(
        self,
        name: str,
        *,
        token: str,
        folder: Path,
        slots: int,
        network: Network,
        clock: PartyClock,
        dice: random.Random,
        checks: Checks,
        trace: Trace,
    ) -> None:
        self.name = name
        self.slots = slots
        self.clock = clock
        self.workers: dict[JobRef, SimulatedWorker] = {}
        self.credential = folder / f"{name}.json"
        self.link: NodeLink | None = None
        self._token = token
        self._network = network
        self._dice = dice
        self._checks = checks
        self._trace = trace
        self._kept = Kept()
        self._running: asyncio.Task[None] | None = None
        self._newest: dict[JobId, Epoch] = {}
        self._generation = 0
        self._ports = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def alive(self) -> bool:
        return self.link is not None

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.status.state is LinkState.CONNECTED

    @property
    def unanswered(self) -> int:
        return 0 if self.link is None else self.link.unanswered_claims

    def start(self) -> None:
        if self.alive:
            return
        self._trace.note(self.name, "starts")
        self.workers.clear()
        self._newest.clear()
        self.link = NodeLink(
            self._token,
            self.credential,
            self._describe,
            lambda: [ref for ref, worker in self.workers.items() if worker.wanted],
            self,
            self.clock,
            backoff=Backoff(uniform=self._dice.random),
            reach=SimulatedReach(self._network, self.name, self._checks, self._admitted),
        )
        for unit in self._kept.claims.values():
            self.link.claim(unit)
        self._running = asyncio.get_running_loop().create_task(self.link.run())

    def kill(self, *, quiet: bool) -> None:
        """SIGKILL of the supervisor, with which its workers end; `quiet`: of the machine's power."""
        if not self.alive:
            return
        self._trace.note(self.name, "dies quietly" if quiet else "is killed")
        for connection in self._network.connections(self.name):
            connection.lose_client(quiet=quiet)
        for task in [self._running, *self._tasks]:
            if task is not None:
                task.cancel()
        self._tasks.clear()
        self.link, self._running = None, None
        for worker in self.workers.values():
            worker.process += 1
            worker.listening = False
        self.workers.clear()

    def _admitted(self) -> None:
        """Some machines lose their power just then: their credential is not on the disk yet, and they come again."""
        if self._dice.random() < ODDS_OF_A_BAD_START:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._lose_first_credential)
            loop.call_later(self._dice.uniform(0.5, 20.0), self.start)

    def _lose_first_credential(self) -> None:
        self.kill(quiet=self._dice.random() < 0.5)
        self.credential.unlink(missing_ok=True)

    def _describe(self) -> NodeInfo:
        device = DeviceInfo(
            device_id=DEVICE,
            kind=DeviceKind.CPU,
            name="simulated",
            slots=self.slots,
            memory_bytes=_UNKNOWN,
            free_bytes=_UNKNOWN,
        )
        return NodeInfo(name=self.name, host="10.0.0.1", version="0", devices=(device,))

    def _later(self, worker: SimulatedWorker, slowest: float, then: Any) -> None:
        """Do `then` after a while, if the worker's process is still the same one."""
        process = worker.process

        async def wait() -> None:
            await asyncio.sleep(self._dice.uniform(0.05, slowest))
            if self.alive and worker.process == process:
                then(worker)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the hub says

    def on_status(self, status: LinkStatus) -> None:
        generation = status.generation or 0
        if status.state is LinkState.CONNECTED:
            text = f"{self.name} hears of generation {generation} after {self._generation}"
            self._checks.expect(generation >= self._generation, Promise.GENERATION, text)
            self._generation = generation

    def on_earnings(self, earnings: Earnings) -> None:
        self._checks.expect(type(earnings.confirmed_micro) is int, Promise.LEDGER, f"{earnings} is no integer")

    def on_assignment(self, assignment: Assignment) -> None:
        reason = self._assign(assignment)
        if reason is not None:
            self._trace.note(self.name, f"refuses {assignment.job_id}/{assignment.epoch}/{assignment.rank}: {reason}")
            self._report_state((assignment.job_id, assignment.epoch, assignment.rank), WorkerState.EXITED, reason)

    def _assign(self, assignment: Assignment) -> str | None:
        """As `Workforce.assign`: start a worker, or let one go on as this rank; the reason when it is refused."""
        job_id, epoch = assignment.job_id, assignment.epoch
        ref = (job_id, epoch, assignment.rank)
        if ref in self.workers:
            return None
        newest = self._newest.get(job_id, Epoch(0))
        if epoch < newest:
            return f"refused: epoch {epoch} is over, this node knows epoch {newest}"
        if assignment.continues is not None and self._goes_on(ref, assignment.continues):
            return None
        holding = [worker for worker in self.workers.values() if worker.wanted and not _older_of(worker, assignment)]
        if len(holding) >= self.slots:
            return f"refused: {self.slots} slots and none is free"
        self._newest[job_id] = epoch
        for older in sorted({other[:2] for other in self.workers if other[0] == job_id and other[1] < epoch}):
            self._release(*older)
        worker = self.workers[ref] = SimulatedWorker(ref)
        self._start(worker)
        return None

    def _goes_on(self, ref: JobRef, before: Rank) -> bool:
        old = (ref[0], Epoch(ref[1] - 1), before)
        worker = self.workers.get(old)
        if worker is None or not worker.wanted:
            return False
        del self.workers[old]
        self.workers[ref] = worker
        worker.ref = ref
        self._newest[ref[0]] = ref[1]
        if worker.listening:
            self._later(worker, SLOWEST_END, self._is_ready)
        return True

    def on_topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        for certificate in certificates:
            worker = self.workers.get((topology.job_id, topology.epoch, certificate.rank))
            if worker is not None and worker.listening and not worker.ending:
                worker.granted = topology.epoch
                worker.state = WorkerState.RUNNING
                self._report_state(worker.ref, WorkerState.RUNNING)

    def on_release(self, job_id: JobId, epoch: Epoch, reason: str) -> None:
        self._release(job_id, epoch)

    def _release(self, job_id: JobId, epoch: Epoch) -> None:
        for ref in [ref for ref in self.workers if ref[:2] == (job_id, epoch)]:
            worker = self.workers[ref]
            if not worker.ending:
                worker.ending = True
                worker.process += 1
                worker.listening = False
                self._report_state(ref, WorkerState.DRAINING, "released")
                self._later(worker, SLOWEST_END, self._is_gone)

    # What workers do

    def _start(self, worker: SimulatedWorker) -> None:
        worker.state = WorkerState.STARTING
        self._report_state(worker.ref, WorkerState.STARTING)
        self._later(worker, SLOWEST_START, self._is_ready)

    def _is_ready(self, worker: SimulatedWorker) -> None:
        worker.listening, worker.state = True, WorkerState.READY
        job_id, epoch, rank = worker.ref
        self._trace.note(self.name, f"{job_id}/{epoch}/{rank} is ready")
        port = next(self._ports) % 60000 + 1
        self._report(WorkerReady(job_id=job_id, epoch=epoch, rank=rank, port=port, csr_pem="csr"))
        self._report_state(worker.ref, WorkerState.READY)

    def _is_gone(self, worker: SimulatedWorker) -> None:
        worker.state = WorkerState.EXITED
        self._report_state(worker.ref, WorkerState.EXITED, "released")
        with suppress(KeyError):
            del self.workers[worker.ref]

    def crash_worker(self, worker: SimulatedWorker) -> None:
        """The process ends by itself; its supervisor starts another one, and gives up after some."""
        if worker.ending or worker.state in (WorkerState.EXITED, WorkerState.BACKOFF, WorkerState.BROKEN):
            return
        job_id, epoch, rank = worker.ref
        self._trace.note(self.name, f"{job_id}/{epoch}/{rank} crashes")
        worker.process += 1
        worker.listening, worker.granted, worker.entered = False, None, None
        worker.failures += 1
        self._report_state(worker.ref, WorkerState.EXITED, "crashed")
        if worker.failures >= FAILURES_TO_BREAK:
            worker.state = WorkerState.BROKEN
            self._report_state(worker.ref, WorkerState.BROKEN, "crashed")
            return
        worker.state = WorkerState.BACKOFF
        self._report_state(worker.ref, WorkerState.BACKOFF, "crashed")
        self._later(worker, SLOWEST_END, self._restart)

    def _restart(self, worker: SimulatedWorker) -> None:
        worker.restarts += 1
        self._start(worker)

    def _report_state(self, ref: JobRef, state: WorkerState, reason: str = "") -> None:
        job_id, epoch, rank = ref
        worker = self.workers.get(ref)
        restarts = 0 if worker is None else worker.restarts
        self._report(WorkerChange(job_id=job_id, epoch=epoch, rank=rank, state=state, restarts=restarts, reason=reason))

    def _report(self, report: WorkerReady | WorkerChange) -> None:
        assert self.link is not None
        self.link.report(report)

    def commit(self, place: JobRef, step: int, micro_batches: int) -> None:
        """A worker has committed a step: it is claimed, and written down before it is sent."""
        job_id, epoch, rank = place
        key = UnitKey(job_id=job_id, epoch=epoch, step=step, rank=rank)
        unit = self._kept.claims.setdefault(key, Unit(key=key, micro_batches=micro_batches))
        assert self.link is not None
        self.link.claim(unit)


def _older_of(worker: SimulatedWorker, assignment: Assignment) -> bool:
    """Workers of an older epoch of the same job make room for this one."""
    return worker.ref[0] == assignment.job_id and worker.ref[1] < assignment.epoch
