"""A trainer: its calls to the hub as `HubClient` makes them, and the protocol of a job's members as `training` has it,
in a model without weights. A step is a moment in which every rank is there; who is lost is left behind in a new epoch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from distensor.comm import codec
from distensor.core.control import (
    JobSpec,
    JobState,
    JobUpdate,
    Reconfiguration,
    Topology,
    Unit,
    UnitKey,
    WorkerState,
)
from distensor.core.errors import (
    AuthenticationError,
    ControlError,
    HubProtocolError,
    HubUnreachableError,
    PlacementError,
    StaleEpochError,
)
from distensor.core.ids import Epoch, JobId, Rank
from distensor.core.parallel import ParallelConfig
from distensor.core.regrouping import Regrouping, with_replaced, with_replicas, without_lost
from distensor.testing.simulation.checks import Checks
from distensor.testing.simulation.client import TrainerClient
from distensor.testing.simulation.network import Network
from distensor.testing.simulation.node import SimulatedNode, SimulatedWorker
from distensor.testing.simulation.trace import Promise, Trace

T = TypeVar("T")

FLUSH_SECONDS = 0.5
START_SECONDS = 90.0
READY_SECONDS = 10.0
RECOVERY_SECONDS = 120.0
MEET_SECONDS = 5.0
_DOWN = (WorkerState.EXITED, WorkerState.BROKEN, WorkerState.DRAINING)


class LostError(Exception):
    """Ranks that are needed are not there."""

    def __init__(self, ranks: Collection[int]) -> None:
        super().__init__(f"lost ranks {sorted(ranks)}")
        self.ranks = frozenset(ranks)


class JobOverError(Exception):
    """The job has ended, or cannot go on."""


@dataclass(kw_only=True, slots=True)
class _Member:
    """A rank of the present epoch, as the trainer met it."""

    node: SimulatedNode
    worker: SimulatedWorker
    process: int
    place: tuple[JobId, Epoch, Rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The newest epoch that the hub has begun, and with which request."""

    epoch: Epoch
    change: Reconfiguration
    since: float


def _as_change(spec: JobSpec) -> Reconfiguration:
    """A job's first epoch, as if it were one of those that follow."""
    none: tuple[Rank | None, ...] = (None,) * spec.parallel.world_size
    return Reconfiguration(
        job_id=JobId(""), request="", epoch=Epoch(0), parallel=spec.parallel, continues=none, csr_pem=""
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What a trainer does in a run."""

    meshes: tuple[ParallelConfig, ...]
    steps: tuple[int, ...]


class SimulatedTrainer:
    """Trains one job after the other until it is told to make no more. `peers`: the machines by
    their names."""

    def __init__(
        self,
        name: str,
        *,
        secret: str,
        wishes: Wishes,
        network: Network,
        dice: random.Random,
        checks: Checks,
        trace: Trace,
        peers: Mapping[str, SimulatedNode],
    ) -> None:
        self.name = name
        self.job_id: JobId | None = None
        self.enough = False
        self.steps = 0
        self._client = TrainerClient(network, name, secret, dice)
        self._wishes = wishes
        self._network = network
        self._dice = dice
        self._checks = checks
        self._trace = trace
        self._peers = peers
        self._latest: JobUpdate | None = None
        self._changed = asyncio.Event()
        self._members: dict[Rank, _Member] = {}
        self._receipts: list[Unit] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._asked: _Asked
        self._unanswered: Reconfiguration | None = None
        self._refused = False
        self._numbers = 0
        self._parallel = ParallelConfig()

    @property
    def alive(self) -> bool:
        return any(not task.done() for task in self._tasks[:1])

    @property
    def busy(self) -> bool:
        """Whether a job or a receipt of this trainer is still to be dealt with."""
        return self.alive and (self.job_id is not None or bool(self._receipts) or not self.enough)

    def start(self) -> None:
        if self.alive:
            return
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._flush())]
        self._tasks[0].add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._checks.broken(Promise.DEFECT, f"{self.name} raised {error!r}")

    def kill(self, *, quiet: bool) -> None:
        """The user's process ends; nobody takes its job over."""
        if not self.alive:
            return
        self._trace.note(self.name, "dies quietly" if quiet else "is killed")
        for connection in self._network.connections(self.name):
            connection.lose_client(quiet=quiet)
        for task in self._tasks:
            task.cancel()
        self._receipts.clear()
        self.job_id = None

    async def _run(self) -> None:
        while not self.enough:
            self._numbers += 1
            await self._one_job(f"{self.name}-{self._numbers}")
            await asyncio.sleep(self._dice.uniform(0.1, 3.0))

    # One job

    async def _one_job(self, submission: str) -> None:
        self._parallel = self._dice.choice(self._wishes.meshes)
        spec = JobSpec(submission=submission, name=submission, parallel=self._parallel, csr_pem="csr")
        try:
            reply = await self._client.call("SubmitJob", codec.write_spec(spec))
        except (PlacementError, HubUnreachableError):
            return
        self.job_id = JobId(reply.job_id)
        self._checks.submitted(self.name, submission, self.job_id)
        await self._same_again(spec)
        self._asked = _Asked(epoch=Epoch(reply.epoch), change=_as_change(spec), since=self._network.time())
        self._latest, self._unanswered, self._refused, self._members = None, None, False, {}
        watching = asyncio.get_running_loop().create_task(self._client.watch(self.job_id, self._told))
        self._tasks.append(watching)
        try:
            state, reason = await self._train_to_the_end()
        finally:
            watching.cancel()
            self._tasks.remove(watching)
        await self._end(state, reason)

    async def _same_again(self, spec: JobSpec) -> None:
        if self._dice.random() < 0.3:
            try:
                again = (await self._client.call("SubmitJob", codec.write_spec(spec))).job_id
            except HubUnreachableError:
                return
            except PlacementError:
                again = "refused"
            same = again == self.job_id
            self._checks.expect(
                same, Promise.SURVIVES, f"{spec.submission} is {self.job_id}, and when repeated {again}"
            )

    async def _train_to_the_end(self) -> tuple[JobState, str]:
        try:
            await self._enter(START_SECONDS)
            for step in range(1, self._dice.choice(self._wishes.steps) + 1):
                await self._step(step)
            return JobState.FINISHED, ""
        except (JobOverError, LostError) as error:
            return JobState.FAILED, f"{type(error).__name__}: {error}"

    async def _end(self, state: JobState, reason: str) -> None:
        job_id, self.job_id = self.job_id, None
        assert job_id is not None
        self._trace.note(self.name, f"ends {job_id}: {state.value} {reason}")
        with suppress(HubUnreachableError):
            await self._client.call("EndJob", codec.write_end(job_id, state, reason))
            self._checks.ended(job_id)

    def _told(self, update: JobUpdate) -> None:
        driver = "" if update.certificate is None else update.certificate.certificate_pem
        self._checks.updated(update.job_id, update.epoch, update.state, driver)
        if update.job_id == self.job_id:
            self._latest = update
            self._changed.set()

    # Steps

    async def _step(self, step: int) -> None:
        """Committed by all, or begun anew by those that are left."""
        await self._grow()
        await asyncio.sleep(self._dice.uniform(0.05, 1.0))
        while lost := self._lost():
            await self._recover(lost)
            await asyncio.sleep(self._dice.uniform(0.05, 1.0))
        self.steps += 1
        micro_batches = self._dice.randint(1, 4)
        self._trace.note(self.name, f"step {step} of {self.job_id}")
        for member in self._members.values():
            claimed = micro_batches + (self._dice.random() < 0.02)  # a provider that asks for more than it did
            if member.node.alive:
                member.node.commit(member.place, step, claimed)
            self._receive(member.place, step, micro_batches)

    def _receive(self, place: tuple[JobId, Epoch, Rank], step: int, micro_batches: int) -> None:
        job_id, epoch, rank = place
        key = UnitKey(job_id=job_id, epoch=epoch, step=step, rank=rank)
        self._receipts.append(Unit(key=key, micro_batches=micro_batches))

    def _lost(self) -> set[int]:
        return {int(rank) for rank, member in self._members.items() if not self._here(member)}

    def _here(self, member: _Member) -> bool:
        same = member.worker.process == member.process and member.worker.listening
        return same and member.node.alive and self._network.path(self.name, member.node.name).up

    async def _flush(self) -> None:
        """As `training.receipts`: a batch stays until the hub has it."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            batch = self._receipts[:2000]
            if not batch:
                continue
            for unit in batch:
                self._checks.trainer_received(self.name, unit)
            try:
                await self._client.call("ReportUnits", codec.write_receipts(batch))
            except ControlError:
                continue
            self._checks.received(batch)
            del self._receipts[: len(batch)]

    async def steal(self, units: list[Unit]) -> None:
        """Give receipts for another trainer's job; the hub has to refuse, in the words for a job that is not there."""
        try:
            await self._client.call("ReportUnits", codec.write_receipts(units))
        except HubUnreachableError:
            return
        except ControlError as error:
            missing = str(error).endswith("was never placed")
            self._checks.expect(missing, Promise.OWNER, f"{self.name} asked for {units[0].key} and heard: {error}")
        else:
            self._checks.broken(Promise.OWNER, f"{self.name} gave receipts for {units[0].key}")

    # Members

    async def _wait_for(self, wanted: Callable[[JobUpdate], bool], seconds: float) -> JobUpdate | None:
        deadline = self._network.time() + seconds
        while True:
            if self._latest is not None and wanted(self._latest):
                return self._latest
            self._changed.clear()
            left = deadline - self._network.time()
            if left <= 0:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def _enter(self, seconds: float) -> None:
        """Wait for the epoch that was asked for, and meet its ranks.

        Raises:
            LostError: ranks that do not come.
            JobOverError: the hub has ended the job.
        """
        epoch, parallel = self._asked.epoch, self._asked.change.parallel

        def told(update: JobUpdate) -> bool:
            begun = update.topology is not None or bool(_down(update))
            return update.state.ended or (update.epoch == epoch and begun)

        update = await self._wait_for(told, seconds)
        if update is None:
            here = {c.rank for c in self._latest.workers if c.state is WorkerState.READY} if self._latest else set()
            raise LostError(set(range(parallel.world_size)) - here or set(range(parallel.world_size)))
        if update.state.ended:
            raise JobOverError(f"the hub says {update.state.value}: {update.reason}")
        if update.topology is None:
            raise LostError(_down(update))
        await self._meet(update.topology)

    async def _meet(self, topology: Topology) -> None:
        deadline = self._network.time() + MEET_SECONDS
        found: dict[Rank, _Member] = {}
        while len(found) < len(topology.members):
            for member in topology.members:
                place = (topology.job_id, topology.epoch, member.rank)
                worker = self._find(member.node_name, place)
                if worker is not None:
                    node = self._peers[member.node_name]
                    found[member.rank] = _Member(node=node, worker=worker, process=worker.process, place=place)
            if self._network.time() >= deadline:
                raise LostError({int(m.rank) for m in topology.members if m.rank not in found} or {0})
            await asyncio.sleep(0.1)
        self._members, self._parallel = found, topology.parallel
        self._trace.note(self.name, f"is in epoch {topology.epoch} of {topology.job_id}")

    def _find(self, name: str, place: tuple[JobId, Epoch, Rank]) -> SimulatedWorker | None:
        holders = [(node, node.workers[place]) for node in self._peers.values() if place in node.workers]
        several = len(holders) > 1
        self._checks.expect(not several, Promise.OWNER, f"{place} has workers on {[node.name for node, _ in holders]}")
        for node, worker in holders:
            there = node is self._peers.get(name) and self._network.path(self.name, node.name).up
            if there and worker.granted == place[1] and worker.listening:
                worker.entered = place
                return worker
        return None

    async def _recover(self, lost: set[int]) -> None:
        """As `training.members`: those that are left go on in a new epoch; a place that has nobody gets a new one."""
        parallel, alive = self._parallel, set(range(self._parallel.world_size)) - lost
        if self._asked.epoch != self._epoch:  # an epoch with more replicas was being prepared
            parallel, alive = _renumbered(self._asked.change, alive)
        await self._regroup(parallel, alive)

    async def _regroup(self, parallel: ParallelConfig, alive: set[int]) -> None:
        deadline = self._network.time() + RECOVERY_SECONDS
        while True:
            try:
                if self._unanswered is not None:
                    change = self._unanswered
                    await self._send(change)
                    parallel, alive = _renumbered(change, alive)
                regrouping = without_lost(parallel, alive) or with_replaced(parallel, alive)
                await self._ask_for(regrouping)
                parallel, alive = regrouping.parallel, set(range(regrouping.parallel.world_size))
                await self._enter(START_SECONDS if regrouping.new else READY_SECONDS)
                return
            except LostError as missing:
                alive -= missing.ranks
            except (PlacementError, HubUnreachableError):
                await asyncio.sleep(1.0)
            if self._network.time() >= deadline:
                raise JobOverError("no members within two minutes")

    @property
    def _epoch(self) -> Epoch:
        return next(iter(self._members.values())).place[1] if self._members else self._asked.epoch

    async def _grow(self) -> None:
        """Between two steps: ask for a replica that is missing, and let it in once it is ready."""
        wanted = max(mesh.data_parallel for mesh in self._wishes.meshes)
        if self._asked.epoch != self._epoch:
            await self._look_after()
        elif self._parallel.data_parallel < wanted and self._unanswered is None and self._dice.random() < 0.3:
            with suppress(PlacementError, HubUnreachableError):
                await self._ask_for(with_replicas(self._parallel, self._parallel.data_parallel + 1))

    async def _look_after(self) -> None:
        latest, asked = self._latest, self._asked
        if latest is None or latest.epoch != asked.epoch:
            return
        down = _down(latest)
        late = self._network.time() - asked.since >= START_SECONDS
        if latest.topology is None and not down and not late:
            return
        try:
            await self._enter(0.0)
        except LostError as missing:
            everyone = set(range(asked.change.parallel.world_size))
            await self._regroup(asked.change.parallel, everyone - missing.ranks)

    async def _ask_for(self, regrouping: Regrouping) -> None:
        self._numbers += 1
        change = Reconfiguration(
            job_id=self._job,
            request=f"{self.name}-r{self._numbers}",
            epoch=self._asked.epoch,
            parallel=regrouping.parallel,
            continues=regrouping.continues,
            csr_pem="csr",
        )
        await self._send(change)

    async def _send(self, change: Reconfiguration) -> None:
        """The hub begins the next epoch. A request that was not answered is kept, to be sent again before another one
        is made: the hub may have done it.

        Raises:
            PlacementError, HubUnreachableError: as the client.
            JobOverError: the job has ended.
        """
        self._unanswered = change
        try:
            reply = await self._client.call("ReconfigureJob", codec.write_reconfiguration(change))
        except HubUnreachableError:
            raise
        except ControlError as error:
            self._unanswered = None
            self._check_refusal(error)
            raise
        self._unanswered = None
        self._checks.reconfigured(change.job_id, Epoch(reply.epoch))
        self._asked = _Asked(epoch=Epoch(reply.epoch), change=change, since=self._network.time())

    def _check_refusal(self, error: ControlError) -> None:
        if isinstance(error, PlacementError):
            self._refused = True
            return
        # A request that was refused may arrive once more when there is room, and make an epoch that nobody hears of.
        excused = isinstance(error, StaleEpochError) and self._refused
        if isinstance(error, StaleEpochError | AuthenticationError | HubProtocolError) and not excused:
            self._checks.broken(Promise.EPOCH, f"{self.name} is refused: {error}")
        raise JobOverError(str(error)) from error

    @property
    def _job(self) -> JobId:
        assert self.job_id is not None
        return self.job_id


def _renumbered(change: Reconfiguration, alive: set[int]) -> tuple[ParallelConfig, set[int]]:
    """The mesh of a change, and those of its ranks that go on from the ranks `alive` before it."""
    return change.parallel, {rank for rank, before in enumerate(change.continues) if before in alive}


def _down(update: JobUpdate) -> set[int]:
    if update.state is not JobState.PLACED:
        return set()
    return {int(change.rank) for change in update.workers if change.state in _DOWN}
