"""The jobs and workers of this node: what the hub assigns becomes processes, what it releases ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distensor.core.clock import Clock
from distensor.core.control import Assignment, Certificate, Topology, Unit, WorkerState
from distensor.core.ids import DeviceId, Epoch, JobId, Rank
from distensor_server.devices.detect import visible
from distensor_server.devices.model import Device
from distensor_server.inventory import Inventory
from distensor_server.lifecycle import Life, RestartPolicy
from distensor_server.messages import assign_line
from distensor_server.picture import KEPT_ENDED_JOBS, JobRecord
from distensor_server.worker import Launch, Worker, WorkerOwner

KEPT_LOGS = 50

Membership = tuple[JobId, Epoch]
WorkerRef = tuple[JobId, Epoch, Rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class PastFailures:
    """What is remembered of a worker from before this process."""

    failures: int
    restarts: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What all workers of this supervisor have in common."""

    command: Sequence[str]
    listen_host: Callable[[], str]
    listen_ports: Callable[[], tuple[int, int] | None]
    """First and last port; None for any."""
    logs: Path
    mark: str
    clock: Clock
    oom_kills: Callable[[], int]
    excused: Callable[[], bool] = lambda: False
    """Whether a failure of this moment does not count."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)


class Workforce:
    """All methods belong to the event loop."""

    def __init__(self, setup: WorkerSetup, inventory: Inventory, owner: WorkerOwner) -> None:
        self._setup = setup
        self._inventory = inventory
        self._owner = owner
        self.policy = setup.policy
        """Holds for all workers from the next event on."""
        self.past: dict[WorkerRef, PastFailures] = {}
        """Failures in a row that a worker begins with when it is assigned."""
        self._jobs: dict[Membership, JobRecord] = {}
        self._workers: dict[WorkerRef, Worker] = {}
        self._beginning: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    @property
    def jobs(self) -> tuple[JobRecord, ...]:
        return tuple(self._jobs.values())

    def running(self) -> list[tuple[JobId, Epoch, Rank]]:
        """The ranks that have a worker or will have one again."""
        return [ref for ref, worker in self._workers.items() if worker.life.wanted]

    def assign(self, assignment: Assignment) -> str | None:
        """Start a worker for `assignment`; the reason when it is refused, None also when it is there already."""
        ref = (assignment.job_id, assignment.epoch, assignment.rank)
        if ref in self._workers:
            return None
        newest = max((epoch for job, epoch in self._jobs if job == assignment.job_id), default=Epoch(0))
        if assignment.epoch < newest:
            return f"epoch {assignment.epoch} of job {assignment.job_id} is over: this node knows epoch {newest}"
        if self._go_on(assignment):
            return None
        device = self._inventory.find(assignment.device_id)
        reason = self._cannot_take(device, assignment)
        if device is None or reason is not None:
            return reason
        self._end_older(assignment)
        self._start(assignment, device)
        return None

    def _go_on(self, assignment: Assignment) -> bool:
        """Where the process that is to go on as this rank is still here, it does, on the device that it has."""
        if assignment.continues is None:
            return False
        before = (assignment.job_id, Epoch(assignment.epoch - 1), assignment.continues)
        worker = self._workers.get(before)
        device = self._inventory.find(assignment.device_id)
        if worker is None or not worker.life.wanted or device is None:
            return False
        job = self._record(assignment)
        job.units += self._jobs[before[:2]].units
        self._jobs[before[:2]].units = 0
        del self._workers[before]
        self._workers[assignment.job_id, assignment.epoch, assignment.rank] = worker
        worker.reassign(assignment, self._launch(assignment, device))
        return True

    def _cannot_take(self, device: Device | None, assignment: Assignment) -> str | None:
        if device is None:
            return f"this node has no device {assignment.device_id!r}"
        if device.unusable is not None:
            return f"device {device.device_id} cannot be used: {device.unusable}"
        # Workers of an older epoch of the same job make room for this one.
        holding = [
            worker
            for worker in self._on(device.device_id)
            if worker.assignment.job_id != assignment.job_id or worker.assignment.epoch == assignment.epoch
        ]
        if len(holding) >= device.slots:
            return f"device {device.device_id} has {device.slots} slots and none is free"
        return None

    def _on(self, device_id: DeviceId) -> Iterable[Worker]:
        """Workers that hold a slot: not those that are on their way out."""
        return (
            worker
            for worker in self._workers.values()
            if worker.assignment.device_id == device_id and worker.life.wanted
        )

    def _end_older(self, assignment: Assignment) -> None:
        for job_id, epoch in list(self._jobs):
            if job_id == assignment.job_id and epoch < assignment.epoch:
                self.release(job_id, epoch, f"superseded by epoch {assignment.epoch}")

    def _record(self, assignment: Assignment) -> JobRecord:
        fresh = JobRecord(job_id=assignment.job_id, name=assignment.job_name, epoch=assignment.epoch, first=assignment)
        return self._jobs.setdefault((assignment.job_id, assignment.epoch), fresh)

    def _start(self, assignment: Assignment, device: Device) -> None:
        membership = (assignment.job_id, assignment.epoch)
        self._record(assignment)
        setup = self._setup
        worker = Worker(
            assignment,
            self._launch(assignment, device),
            self._owner,
            clock=setup.clock,
            oom_kills=setup.oom_kills,
            excused=setup.excused,
            policy=lambda: self.policy,
            life=self._life_before((*membership, assignment.rank)),
        )
        leaving = [other for other in self._workers.values() if other.assignment.device_id == device.device_id]
        self._workers[(*membership, assignment.rank)] = worker
        task = asyncio.get_running_loop().create_task(
            _begin_after(worker, [other for other in leaving if other.life.ending])
        )
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _life_before(self, ref: WorkerRef) -> Life:
        past = self.past.pop(ref, None)
        if past is None:
            return Life()
        state = WorkerState.BROKEN if past.failures >= self.policy.failures_to_break else WorkerState.EXITED
        # An EXITED one must look as if it had never begun, or it would not begin: the reason stays with the broken.
        reason = past.reason if state is WorkerState.BROKEN else ""
        return Life(state=state, failures=past.failures, restarts=past.restarts, last_exit=reason)

    def _launch(self, assignment: Assignment, device: Device) -> Launch:
        memory_limit, threads = self._inventory.share(device)
        extra = [("OMP_NUM_THREADS", str(threads)), ("MKL_NUM_THREADS", str(threads))]
        # By UUID: the order of devices changes from one boot to the next. The worker sees this one only.
        extra += visible(device).items()
        prune_logs(self._setup.logs, KEPT_LOGS)
        return Launch(
            command=self._setup.command,
            assign=assign_line(
                assignment,
                device_kind=device.kind,
                listen_host=self._setup.listen_host(),
                listen_ports=self._setup.listen_ports(),
                memory_limit=memory_limit,
                threads=threads,
            ),
            log_path=self._setup.logs / f"{file_word(assignment.worker_id)}.log",
            mark=self._setup.mark,
            extra_environment=tuple(extra),
        )

    def topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        """Hand the topology and its own certificate to each worker of the membership."""
        job = self._jobs.get((topology.job_id, topology.epoch))
        if job is None or job.ended is not None:
            return
        job.topology = topology
        for certificate in certificates:
            worker = self._workers.get((topology.job_id, topology.epoch, certificate.rank))
            if worker is not None:
                worker.grant(topology, certificate)

    def release(self, job_id: JobId, epoch: Epoch, reason: str) -> bool:
        """The workers of this membership may end. False when there is none, or it was released before."""
        job = self._jobs.get((job_id, epoch))
        if job is None or job.ended is not None:
            return False
        job.ended = reason or "released"
        left = self._of((job_id, epoch))
        for worker in left:
            worker.stop(f"released: {job.ended}")
        if not left and (job_id, Epoch(epoch + 1)) in self._jobs:
            del self._jobs[job_id, epoch]  # all of it goes on in the next one
        self._forget_old_jobs()
        return True

    def claimed(self, unit: Unit) -> None:
        mine = [job for job in self._jobs.values() if job.job_id == unit.key.job_id and job.epoch >= unit.key.epoch]
        job = min(mine, key=lambda job: job.epoch, default=None)
        if job is not None:
            job.units += 1

    def drain_all(self, seconds: float, why: str) -> None:
        for worker in self.workers:
            worker.drain(seconds, why)

    def stop_all(self, why: str) -> None:
        for worker in self.workers:
            worker.stop(why)

    def reset_breakers(self, name: str | None) -> list[str]:
        """Start broken workers again, all or the one called `name`; returns which."""
        broken = [
            worker for worker in self.workers if worker.life.state is WorkerState.BROKEN and name in (None, worker.name)
        ]
        for worker in broken:
            worker.reset_breaker()
        return [worker.name for worker in broken]

    def clock_was_set(self, by: float) -> None:
        for worker in self.workers:
            worker.clock_was_set(by)

    async def all_gone(self) -> None:
        """Return when no worker has a process and none will start one."""
        await asyncio.gather(*self._beginning)
        await asyncio.gather(*(worker.gone.wait() for worker in self.workers))

    def _of(self, membership: Membership) -> list[Worker]:
        return [worker for ref, worker in self._workers.items() if ref[:2] == membership]

    def _forget_old_jobs(self) -> None:
        """The last few ended jobs stay to be looked at; older ones go once their workers are gone."""
        ended = [membership for membership, job in self._jobs.items() if job.ended is not None]
        for membership in ended[:-KEPT_ENDED_JOBS]:
            if not any(worker.life.alive for worker in self._of(membership)):
                del self._jobs[membership]
                for ref in [ref for ref in self._workers if ref[:2] == membership]:
                    del self._workers[ref]


async def _begin_after(worker: Worker, leaving: Sequence[Worker]) -> None:
    """A device's memory is free only when its last owner is gone, and that takes a grace at most."""
    for other in leaving:
        await other.gone.wait()
    worker.begin()


def file_word(text: str) -> str:
    """A name of the hub's as a file name: nothing in it can lead out of the directory."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:100] or "worker"


def prune_logs(directory: Path, keep: int) -> None:
    """Remove the oldest log files beyond `keep`."""
    files = sorted(directory.glob("*.log*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[keep:]:
        path.unlink(missing_ok=True)
