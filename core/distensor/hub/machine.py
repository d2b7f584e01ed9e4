"""The hub's state machine: events in, effects out. No socket, no clock, no database.

`now` is always monotonic seconds of the hub. Nodes are judged by when the hub heard them, never by their clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from distensor.comm.messages import Heartbeat, JobRef, Register, Release, TopologyGrant
from distensor.core.control import (
    Earnings,
    JobSpec,
    JobState,
    Mesh,
    NodeInfo,
    Reconfiguration,
    TakeOver,
    WorkerChange,
    WorkerReady,
)
from distensor.core.errors import ConfigError, ControlError, HubProtocolError, PlacementError, StaleEpochError
from distensor.core.ids import DRIVER_RANK, AccountId, Epoch, Generation, JobId, NodeId, Rank
from distensor.core.job_report import JobReport, JobSummary
from distensor.hub import jobs
from distensor.hub.accounts import Quota
from distensor.hub.effects import Effect, Note, Publish, SaveJob, SaveRank, Send, SessionId
from distensor.hub.ledger.accounts import Policy
from distensor.hub.membership import Membership
from distensor.hub.records import JobRecord, NodeRecord
from distensor.hub.scheduling import Schedule

FIRST_EPOCH = Epoch(1)
FREE_TERMS = Policy()
MOST_ENDED = 1000
"""How many jobs that ended are kept in memory; the books keep all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the hub waits, in seconds."""

    heartbeat: float = 2.0
    silent_heartbeats: int = 3
    node_gone: float = 30.0
    workers_ready: float = 120.0
    trainer_gone: float = 300.0
    """The workers of a job keep what they hold for so long after its trainer was last heard of."""
    passed_over: float = 600.0
    """After how long in the queue no other job may pass one any more."""

    @property
    def silence(self) -> float:
        """Of a node of a hub that has few of them."""
        return self.heartbeat * self.silent_heartbeats


DEFAULT_PATIENCE = Patience()


class Signer(Protocol):
    """The hub's authority."""

    @property
    def authority_pem(self) -> str: ...

    def sign(self, csr_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        """Raises: HubProtocolError: the request cannot be read or is not signed by its own key."""

    def sign_anew(self, certificate_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        """A certificate of now over the key of one that was signed before.

        Raises: HubProtocolError: it is none of ours.
        """


class HubMachine:
    """All nodes and jobs of a hub."""

    def __init__(
        self,
        *,
        generation: Generation,
        nodes: Iterable[NodeRecord],
        jobs: Iterable[JobRecord],
        submissions: Mapping[tuple[str, str], tuple[JobId, Epoch]],
        earnings: Mapping[NodeId, Earnings],
        signer: Signer,
        new_job_id: Callable[[], JobId],
        patience: Patience,
        now: float,
        relay: str = "",
        quotas: Mapping[str, Quota] = MappingProxyType({}),
    ) -> None:
        self._relay = relay
        self.generation = generation
        self.patience = patience
        self._signer = signer
        self.new_job_id = new_job_id
        self._members = Membership(
            generation=generation,
            nodes=nodes,
            heartbeat=patience.heartbeat,
            silent_beats=patience.silent_heartbeats,
            now=now,
        )
        self._jobs = {job.job_id: job for job in jobs}
        self._submissions = dict(submissions)
        self._live = {job.job_id for job in self._jobs.values() if not job.state.ended}
        self._ended = deque(job.job_id for job in self._jobs.values() if job.state.ended)
        self._placed_at = dict.fromkeys(self._live, now)
        self._trainer_heard = dict.fromkeys(self._live, now)
        self._schedule = Schedule(self._jobs, self._live, self._members, patience.passed_over, quotas, now)
        for node_id, sum_ in earnings.items():
            self._members.set_earnings(node_id, sum_)

    # Nodes

    @property
    def heartbeat(self) -> float:
        """How often a node that joins now is to beat, in seconds."""
        return self._members.heartbeat

    def node(self, node_id: NodeId) -> NodeRecord | None:
        return self._members.record(node_id)

    def node_of(self, session: SessionId) -> NodeId | None:
        return self._members.node_of(session)

    def add_node(self, record: NodeRecord, now: float) -> None:
        """A node that has just been admitted; its record is already committed."""
        self._members.add(record, now)

    def set_earnings(self, node_id: NodeId, earnings: Earnings) -> None:
        self._members.set_earnings(node_id, earnings)

    def join(self, session: SessionId, node_id: NodeId, register: Register, now: float) -> list[Effect]:
        """A node's stream is open: bring what the node has and what it should have together."""
        effects = self._members.join(session, node_id, register.info, now)
        has = set(register.running)
        for job_id in sorted(self._live):
            effects += self._restore(session, node_id, self._jobs[job_id], has)
        # Only now: a process that goes on in a newer epoch has just been told so, and is no longer in the older one.
        for membership in sorted({ref[:2] for ref in has}):
            effects += self._release_stale(session, *membership)
        return effects

    def leave(self, session: SessionId, now: float) -> list[Effect]:
        """The stream ended. Its workers go on; their node comes back or is missed by `tick`."""
        return self._members.leave(session, now)

    def beat(self, session: SessionId, beat: Heartbeat, now: float, hub_time: float) -> list[Effect]:
        return self._members.beat(session, beat, now, hub_time)

    def mesh(self, now: float, account: AccountId | None = None) -> Mesh:
        return self._members.mesh(self._schedule.used(), now, account)

    def _restore(self, session: SessionId, node_id: NodeId, job: JobRecord, has: set[JobRef]) -> list[Effect]:
        mine = [rank for rank in job.ranks if rank.node_id == node_id]
        missing = [rank for rank in mine if (job.job_id, job.epoch, rank.rank) not in has]
        if not mine:
            return []
        if job.state is JobState.PLACED:
            return [Send(session=session, message=jobs.assignment_of(job, rank)) for rank in missing]
        effects: list[Effect] = [self._grant(session, node_id, job)]
        for rank in missing:
            effects += self._change_rank(job.job_id, jobs.lost(job, rank))
        return effects

    def _release_stale(self, session: SessionId, job_id: JobId, epoch: Epoch) -> list[Effect]:
        """A release for a membership that no longer is one; nothing for one that is."""
        job = self._jobs.get(job_id)
        if job is not None and not job.state.ended and job.epoch == epoch:
            return []
        reason = jobs.why_stale(job, epoch)
        release = Release(job_id=job_id, epoch=epoch, reason=reason)
        return [Send(session=session, message=release)]

    def _grant(self, session: SessionId, node_id: NodeId, job: JobRecord) -> Effect:
        grant = TopologyGrant(
            topology=jobs.topology_of(job, self._infos(job), self._relay),
            certificates=jobs.certificates_of(job, node_id, self._signer.authority_pem),
        )
        return Send(session=session, message=grant)

    def _name(self, node_id: NodeId) -> str:
        return self._members.info(node_id).name

    def _infos(self, job: JobRecord) -> Mapping[NodeId, NodeInfo]:
        return {node_id: self._members.info(node_id) for node_id in job.node_ids}

    # Workers

    def worker_ready(self, session: SessionId, ready: WorkerReady) -> list[Effect]:
        """A worker listens and asks for its certificate."""
        job, refusal = self._owned(session, ready.job_id, ready.epoch, ready.rank)
        if job is None:
            return refusal
        try:
            certificate = self._signer.sign(ready.csr_pem, job.job_id, job.epoch, ready.rank)
        except HubProtocolError as error:
            return self._fail(job, f"rank {ready.rank} sent a certificate request that is refused: {error}")
        started = job.state is JobState.PLACED
        job = jobs.with_ready(job, ready, certificate)
        if started and job.state is JobState.RUNNING:
            return self._begin(job)
        return [*self._keep_rank(job, ready.rank), self._publish(job)]

    def worker_changed(self, session: SessionId, change: WorkerChange) -> list[Effect]:
        job, refusal = self._owned(session, change.job_id, change.epoch, change.rank)
        return refusal if job is None else self._change_rank(job.job_id, change)

    def _change_rank(self, job_id: JobId, change: WorkerChange) -> list[Effect]:
        before = self._jobs[job_id]
        job = jobs.with_change(before, change)
        if job == before:
            return []
        effects = self._keep_rank(job, change.rank)
        if job.state.ended:
            return effects + self._finish(job)
        return [*effects, self._publish(job)]

    def _owned(
        self, session: SessionId, job_id: JobId, epoch: Epoch, rank: Rank
    ) -> tuple[JobRecord | None, list[Effect]]:
        """The job, if this session's node holds the rank in the present epoch; else what to answer."""
        node_id = self._members.node_of(session)
        if node_id is None:
            return None, []
        if stale := self._release_stale(session, job_id, epoch):
            return None, stale
        job = self._jobs[job_id]
        if rank >= len(job.ranks) or job.ranks[rank].node_id != node_id:
            who = f"node {self._name(node_id)} ({node_id})"
            return None, [Note(text=f"{who} spoke for rank {rank} of job {job_id}, which is not its own")]
        return job, []

    def _begin(self, job: JobRecord) -> list[Effect]:
        job = jobs.signed_together(job, self._signer.sign_anew)
        effects: list[Effect] = [SaveJob(job=job)]
        for rank in job.ranks:
            effects += self._keep_rank(job, rank.rank)
        effects.append(Note(text=f"job {job.name} ({job.job_id}) runs"))
        effects += [self._grant(session, node_id, job) for node_id, session in self._sessions(job)]
        return [*effects, self._publish(job)]

    def _sessions(self, job: JobRecord) -> Iterator[tuple[NodeId, SessionId]]:
        """The open streams of the job's nodes."""
        for node_id in job.node_ids:
            session = self._members.session_of(node_id)
            if session is not None:
                yield node_id, session

    def _keep_rank(self, job: JobRecord, rank: Rank) -> list[Effect]:
        self._jobs[job.job_id] = job
        return [SaveRank(job_id=job.job_id, epoch=job.epoch, rank=job.ranks[rank])]

    # Jobs

    def submitted(self, owner: str, submission: str) -> tuple[JobId, Epoch] | None:
        """The job that a submission became, and its present epoch."""
        return self._submissions.get((owner, submission))

    def submit(
        self, owner: str, spec: JobSpec, now: float, job_id: JobId | None = None, terms: Policy = FREE_TERMS
    ) -> tuple[JobId, Epoch, list[Effect]]:
        """Place a job. The same submission of the same owner is the same job.

        `job_id`: the one under which money was set aside for it, where that was done.

        Raises:
            PlacementError: the mesh cannot carry it.
            HubProtocolError: the driver's certificate request is refused.
        """
        known = self._submissions.get((owner, spec.submission))
        if known is not None:
            return *known, []
        job_id, epoch = job_id or self.new_job_id(), FIRST_EPOCH
        job = JobRecord(
            job_id=job_id,
            owner=owner,
            submission=spec.submission,
            name=spec.name,
            parallel=spec.parallel,
            epoch=epoch,
            state=JobState.QUEUED,
            driver_certificate_pem="",
            ranks=(),
            wish=spec,
            price=terms.micro_per_micro_batch,
            fee_per_mille=terms.fee_per_mille,
        )
        try:
            job = self._schedule.placed(job, spec, now)
        except PlacementError as error:
            if not spec.wait:
                raise
            job = replace(job, reason=str(error))
        job = replace(job, driver_certificate_pem=self._signer.sign(spec.csr_pem, job_id, epoch, DRIVER_RANK))
        if job.state is JobState.QUEUED:
            return job_id, epoch, self._wait(job, spec, now)
        return job_id, epoch, self._start(job, now, new=True)

    def _wait(self, job: JobRecord, spec: JobSpec, now: float) -> list[Effect]:
        position = self._schedule.enqueue(job, spec, now)
        self._remember(job, now)
        note = f"job {job.name} ({job.job_id}) waits at place {position} of the queue: {job.reason}"
        return [SaveJob(job=job, new=True), self._publish(job), Note(text=note)]

    def _remember(self, job: JobRecord, now: float) -> None:
        self._jobs[job.job_id] = job
        self._submissions[job.owner, job.submission] = job.job_id, job.epoch
        self._live.add(job.job_id)
        self._placed_at[job.job_id] = self._trainer_heard[job.job_id] = now

    def _start(self, job: JobRecord, now: float, *, new: bool) -> list[Effect]:
        self._remember(job, now)
        self._schedule.waits_no_longer(job.job_id)
        effects: list[Effect] = [SaveJob(job=job, new=new, new_epoch=not new)]
        sessions = dict(self._sessions(job))
        effects += [
            Send(session=sessions[rank.node_id], message=jobs.assignment_of(job, rank))
            for rank in job.ranks
            if rank.node_id in sessions
        ]
        names = ", ".join(map(self._name, job.node_ids))
        note = f"job {job.name} ({job.job_id}) placed: {len(job.ranks)} workers on {names}"
        return [*effects, self._publish(job), Note(text=note)]

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        self._schedule.set_quotas(quotas)

    def reconfigure(self, owner: str, change: Reconfiguration, now: float) -> tuple[Epoch, list[Effect]]:
        """Begin the next epoch of a job, with other members. The same request is the same epoch.

        Raises:
            ControlError: as `job_of`; also a job that has ended, and ranks that are not its own.
            StaleEpochError: asked from another epoch than the present one.
            PlacementError: there is no place for the new ranks; nothing has changed.
            HubProtocolError: the driver's certificate request is refused.
        """
        before = self.job_of(owner, change.job_id)
        if before.request == change.request:
            return before.epoch, []
        if before.state.ended:
            raise ControlError(f"job {before.job_id} is {before.state.value}: {before.reason or 'no reason given'}")
        if before.state is JobState.QUEUED:
            raise ControlError(f"job {before.job_id} waits in the queue: it has no members yet that could be others")
        if before.epoch != change.epoch:
            raise StaleEpochError(f"job {before.job_id} is in epoch {before.epoch}, not {change.epoch}")
        kept = [rank for rank in change.continues if rank is not None]
        if any(rank >= before.parallel.world_size for rank in kept):
            last = before.parallel.world_size - 1
            raise ControlError(f"job {before.job_id} has ranks 0 to {last}, not {max(kept)}")
        certificate = self._signer.sign(change.csr_pem, before.job_id, Epoch(before.epoch + 1), DRIVER_RANK)
        job = jobs.reconfigured(before, change, self._schedule.places_of_new(before, change, now), certificate)
        return job.epoch, self._regroup(before, job, now)

    def take_over(self, owner: str, taken: TakeOver, now: float) -> tuple[Epoch, list[Effect]]:
        """Begin an epoch of the same ranks for a trainer that was started again. Raises as `reconfigure` does."""
        job = self.job_of(owner, taken.job_id)
        change = Reconfiguration(
            job_id=job.job_id,
            request=taken.request,
            epoch=job.epoch,
            parallel=job.parallel,
            continues=tuple(rank.rank for rank in job.ranks[: job.parallel.world_size]),  # aggregators do not
            csr_pem=taken.csr_pem,
        )
        return self.reconfigure(owner, change, now)

    def _regroup(self, before: JobRecord, job: JobRecord, now: float) -> list[Effect]:
        """Processes that go on hear of it before those that do not are released."""
        self._remember(job, now)
        self._schedule.freed()
        effects: list[Effect] = [SaveJob(job=job, new_epoch=True)]
        sessions = dict(self._sessions(job))
        effects += [
            Send(session=sessions[rank.node_id], message=jobs.assignment_of(job, rank))
            for rank in sorted(job.ranks, key=lambda rank: rank.continues is None)
            if rank.node_id in sessions
        ]
        release = Release(job_id=job.job_id, epoch=before.epoch, reason=f"superseded by epoch {job.epoch}")
        effects += [Send(session=session, message=release) for _, session in self._sessions(before)]
        kept = sum(rank.continues is not None for rank in job.ranks)
        note = (
            f"job {job.name} ({job.job_id}) goes on in epoch {job.epoch}: {kept} of {len(before.ranks)} workers stay, "
            f"{len(job.ranks) - kept} are new"
        )
        return [*effects, self._publish(job), Note(text=note)]

    def summaries(self, owner: str | None, *, ended: bool) -> list[JobSummary]:
        """The jobs of an owner, or of all."""
        return self._schedule.summaries(owner, ended=ended)

    def report(self, job_id: JobId, now: float) -> JobReport:
        """Why a job is where it is, or what it waits for. The job is known."""
        return self._schedule.report(job_id, now)

    def job_of(self, owner: str, job_id: JobId) -> JobRecord:
        """Raises: ControlError: no such job, or another owner's."""
        job = self._jobs.get(job_id)
        if job is None or job.owner != owner:
            raise ControlError(f"the hub knows no job {job_id}")
        return job

    def owner_of(self, job_id: JobId) -> str | None:
        job = self._jobs.get(job_id)
        return None if job is None else job.owner

    def heard_trainer(self, job_id: JobId, now: float) -> None:
        """The job's trainer has shown that it is alive."""
        if job_id in self._trainer_heard:
            self._trainer_heard[job_id] = now

    def end(self, owner: str, job_id: JobId, state: JobState, reason: str, epoch: Epoch | None = None) -> list[Effect]:
        """End a job; ending it again changes nothing. `epoch`: the one that its trainer is in, where it says so.

        Raises:
            ControlError: as `job_of`.
            ConfigError: `state` is no end.
            StaleEpochError: another trainer has taken the job over since.
        """
        if not state.ended:
            raise ConfigError(f"end_job(state={state.value!r}): expected finished, failed or cancelled")
        job = self.job_of(owner, job_id)
        if epoch is not None and epoch < job.epoch and not job.state.ended:
            raise StaleEpochError(f"job {job_id} is in epoch {job.epoch}, not {epoch}")
        return [] if job.state.ended else self._finish(jobs.ended(job, state, reason))

    def _fail(self, job: JobRecord, reason: str) -> list[Effect]:
        return self._finish(jobs.ended(job, JobState.FAILED, reason))

    def _finish(self, job: JobRecord) -> list[Effect]:
        self._jobs[job.job_id] = job
        self._live.discard(job.job_id)
        self._schedule.waits_no_longer(job.job_id)
        self._ended.append(job.job_id)
        while len(self._ended) > MOST_ENDED:
            del self._jobs[self._ended.popleft()]
        self._placed_at.pop(job.job_id, None)
        self._trainer_heard.pop(job.job_id, None)
        effects: list[Effect] = [SaveJob(job=job)]
        release = Release(job_id=job.job_id, epoch=job.epoch, reason=job.reason or job.state.value)
        effects += [Send(session=session, message=release) for _, session in self._sessions(job)]
        note = f"job {job.name} ({job.job_id}) {job.state.value}{': ' + job.reason if job.reason else ''}"
        return [*effects, self._publish(job), Note(text=note)]

    def _publish(self, job: JobRecord) -> Effect:
        return self.update(job)

    def update(self, job: JobRecord) -> Publish:
        """The present state of a job, for a watcher that has just come."""
        return Publish(update=jobs.update_of(job, self._infos(job), self._signer.authority_pem, self._relay))

    # Time

    def tick(self, now: float) -> list[Effect]:
        """Notice who has been silent for too long."""
        effects = self._members.drop_silent(now)
        for job_id in sorted(self._live):
            job = self._jobs[job_id]
            if reason := self._overdue(job, now):
                effects += self._fail(job, reason)
        return effects + self._serve(now)

    def _serve(self, now: float) -> list[Effect]:
        """Place the jobs that wait and fit now."""
        effects: list[Effect] = []
        for placed in self._schedule.served(now):
            effects += self._start(placed, now, new=False)
        return effects

    def _overdue(self, job: JobRecord, now: float) -> str | None:
        silence = now - self._trainer_heard[job.job_id]
        if silence >= self.patience.trainer_gone:
            return f"the trainer has not been heard of for {silence:.0f} s"
        if job.state is not JobState.PLACED or job.request:
            return None
        for rank in job.ranks:
            gone = self._members.seconds_gone(rank.node_id, now)
            if gone > self.patience.node_gone:
                return f"node {self._name(rank.node_id)} of rank {rank.rank} has been gone for {gone:.0f} s"
        waited = now - self._placed_at[job.job_id]
        if waited < self.patience.workers_ready:
            return None
        late = ", ".join(f"rank {rank.rank} on {self._name(rank.node_id)}" for rank in jobs.not_ready(job))
        return f"workers were not ready within {waited:.0f} s: {late}"
