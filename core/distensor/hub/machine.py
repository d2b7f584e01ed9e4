"""The hub's state machine: events in, effects out. No socket, no clock, no database.

`now` is always monotonic seconds of the hub. Nodes are judged by when the hub heard them, never by their clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from distensor.comm.messages import (
    Heartbeat,
    HeartbeatAnswer,
    JobRef,
    Register,
    Rejected,
    Release,
    TopologyGrant,
)
from distensor.core.control import (
    Earnings,
    JobSpec,
    JobState,
    Mesh,
    MeshNode,
    NodeInfo,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.errors import AuthenticationError, ConfigError, ControlError, HubProtocolError
from distensor.core.ids import DRIVER_RANK, Epoch, Generation, JobId, NodeId, Rank, WorkerId
from distensor.core.reading import Unavailable
from distensor.hub import jobs
from distensor.hub.effects import (
    Disconnect,
    Effect,
    Note,
    Publish,
    SaveJob,
    SaveNode,
    SaveRank,
    Send,
    SessionId,
    SpendToken,
)
from distensor.hub.placement import DeviceOffer, NodeOffer, place
from distensor.hub.records import JobRecord, NodeRecord, RankRecord

FIRST_EPOCH = Epoch(1)
NOTHING_EARNED = Earnings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the hub waits, in seconds."""

    heartbeat: float = 2.0
    silent_heartbeats: int = 3
    node_gone: float = 30.0
    workers_ready: float = 120.0
    trainer_gone: float = 120.0

    @property
    def silence(self) -> float:
        return self.heartbeat * self.silent_heartbeats


DEFAULT_PATIENCE = Patience()


class Signer(Protocol):
    """The hub's authority."""

    @property
    def authority_pem(self) -> str: ...

    def sign(self, csr_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        """Raises: HubProtocolError: the request cannot be read or is not signed by its own key."""


@dataclass(slots=True)
class _Node:
    """A node in memory."""

    record: NodeRecord
    session: SessionId | None = None
    heard_at: float | None = None
    answered: bool = False
    accepting: bool = True
    gone_since: float = 0.0
    earnings: Earnings = NOTHING_EARNED


class HubMachine:
    """All nodes and jobs of a hub."""

    def __init__(
        self,
        *,
        generation: Generation,
        nodes: Iterable[NodeRecord],
        jobs: Iterable[JobRecord],
        earnings: Mapping[NodeId, Earnings],
        signer: Signer,
        new_job_id: Callable[[], JobId],
        patience: Patience,
        now: float,
    ) -> None:
        self.generation = generation
        self.patience = patience
        self._signer = signer
        self._new_job_id = new_job_id
        self._nodes = {node.node_id: _Node(record=node, gone_since=now) for node in nodes}
        self._jobs = {job.job_id: job for job in jobs}
        self._by_submission = {(job.owner, job.submission): job.job_id for job in self._jobs.values()}
        self._by_session: dict[SessionId, NodeId] = {}
        self._live = {job.job_id for job in self._jobs.values() if not job.state.ended}
        self._placed_at = dict.fromkeys(self._live, now)
        self._trainer_heard = dict.fromkeys(self._live, now)
        for node_id, sum_ in earnings.items():
            self.set_earnings(node_id, sum_)

    # Nodes

    def node(self, node_id: NodeId) -> NodeRecord | None:
        node = self._nodes.get(node_id)
        return None if node is None else node.record

    def node_of(self, session: SessionId) -> NodeId | None:
        return self._by_session.get(session)

    def add_node(self, record: NodeRecord, now: float) -> None:
        """A node that has just been admitted; its record is already committed."""
        known = self._nodes.get(record.node_id)
        if known is None:
            self._nodes[record.node_id] = _Node(record=record, gone_since=now)
        else:
            known.record = record

    def set_earnings(self, node_id: NodeId, earnings: Earnings) -> None:
        if node := self._nodes.get(node_id):
            node.earnings = earnings

    def join(self, session: SessionId, node_id: NodeId, register: Register, now: float) -> list[Effect]:
        """A node's stream is open. An older stream of the same node ends: the newer one wins."""
        node = self._nodes[node_id]
        effects: list[Effect] = []
        if node.session is not None:
            why = Rejected(code="replaced", reason="this node has connected again with the same credential")
            effects.append(Disconnect(session=node.session, why=why))
            del self._by_session[node.session]
        node.session, node.heard_at, node.answered, node.accepting = session, now, False, True
        self._by_session[session] = node_id
        effects += self._described(node, register.info)
        effects.append(Note(text=f"node {register.info.name} ({node_id}) connected"))
        return effects + self._reconcile(node, register.running)

    def leave(self, session: SessionId, now: float) -> list[Effect]:
        """The stream ended. Its workers go on; their node comes back or is missed by `tick`."""
        node_id = self._by_session.pop(session, None)
        if node_id is None:
            return []
        node = self._nodes[node_id]
        node.session, node.answered, node.gone_since = None, False, now
        return [Note(text=f"node {node.record.info.name} ({node_id}) disconnected")]

    def beat(self, session: SessionId, beat: Heartbeat, now: float, hub_time: float) -> list[Effect]:
        """A heartbeat, and its answer. The node counts as connected from the first answer on."""
        node = self._of(session)
        if node is None:
            return []
        effects: list[Effect] = []
        if not node.answered:
            effects.append(SpendToken(node=node.record))
        node.heard_at, node.answered, node.accepting = now, True, beat.accepting
        if beat.info is not None:
            effects += self._described(node, beat.info)
        answer = HeartbeatAnswer(
            sequence=beat.sequence,
            generation=self.generation,
            earnings=node.earnings,
            hub_time=hub_time,
        )
        return [*effects, Send(session=session, message=answer)]

    def mesh(self, now: float) -> Mesh:
        nodes = sorted(self._nodes.values(), key=lambda node: (node.record.info.name, node.record.node_id))
        return Mesh(generation=self.generation, nodes=tuple(self._seen(node, now) for node in nodes))

    def _seen(self, node: _Node, now: float) -> MeshNode:
        connected = self._is_connected(node, now)
        return MeshNode(
            info=replace(node.record.info, node_id=node.record.node_id),
            connected=connected,
            free_slots=self._offer(node).slots if connected else 0,
            seconds_since_heartbeat=Unavailable(reason="no heartbeat since the hub started")
            if node.heard_at is None
            else now - node.heard_at,
            confirmed_micro=node.earnings.confirmed_micro,
        )

    def _is_connected(self, node: _Node, now: float) -> bool:
        heard = node.heard_at is not None and now - node.heard_at < self.patience.silence
        return node.session is not None and node.answered and heard

    def _of(self, session: SessionId) -> _Node | None:
        node_id = self._by_session.get(session)
        return None if node_id is None else self._nodes[node_id]

    def _described(self, node: _Node, info: NodeInfo) -> list[Effect]:
        info = replace(info, node_id=node.record.node_id)
        if info == node.record.info:
            return []
        node.record = replace(node.record, info=info)
        return [SaveNode(node=node.record)]

    def _offer(self, node: _Node) -> NodeOffer:
        """What is left of the node's slots; nothing while it accepts no work."""
        used: dict[str, int] = {}
        for job_id in self._live:
            for rank in self._jobs[job_id].ranks:
                if rank.node_id == node.record.node_id:
                    used[rank.device_id] = used.get(rank.device_id, 0) + 1
        devices = tuple(
            DeviceOffer(
                device_id=device.device_id,
                kind=device.kind,
                slots=max(0, device.slots - used.get(device.device_id, 0)),
                free_bytes=None if isinstance(device.free_bytes, Unavailable) else device.free_bytes,
            )
            for device in node.record.info.devices
            if device.unusable is None and node.accepting
        )
        return NodeOffer(node_id=node.record.node_id, name=node.record.info.name, devices=devices)

    def _reconcile(self, node: _Node, running: Iterable[JobRef]) -> list[Effect]:
        """Bring what the node has and what it should have together."""
        assert node.session is not None
        has = set(running)
        effects: list[Effect] = []
        for membership in sorted({ref[:2] for ref in has}):
            effects += self._release_stale(node.session, *membership)
        for job_id in sorted(self._live):
            effects += self._restore(node, self._jobs[job_id], has)
        return effects

    def _restore(self, node: _Node, job: JobRecord, has: set[JobRef]) -> list[Effect]:
        assert node.session is not None
        mine = [rank for rank in job.ranks if rank.node_id == node.record.node_id]
        missing = [rank for rank in mine if (job.job_id, job.epoch, rank.rank) not in has]
        if not mine:
            return []
        if job.state is JobState.PLACED:
            return [Send(session=node.session, message=jobs.assignment_of(job, rank)) for rank in missing]
        effects: list[Effect] = [self._grant(node.session, node.record.node_id, job)]
        for rank in missing:
            effects += self._change_rank(job.job_id, _lost(job, rank))
        return effects

    def _release_stale(self, session: SessionId, job_id: JobId, epoch: Epoch) -> list[Effect]:
        """A release for a membership that no longer is one; nothing for one that is."""
        job = self._jobs.get(job_id)
        if job is not None and not job.state.ended and job.epoch == epoch:
            return []
        reason = _why_stale(job, epoch)
        release = Release(job_id=job_id, epoch=epoch, reason=reason)
        return [Send(session=session, message=release)]

    def _grant(self, session: SessionId, node_id: NodeId, job: JobRecord) -> Effect:
        grant = TopologyGrant(
            topology=jobs.topology_of(job, self._infos()),
            certificates=jobs.certificates_of(job, node_id, self._signer.authority_pem),
        )
        return Send(session=session, message=grant)

    def _infos(self) -> Mapping[NodeId, NodeInfo]:
        return {node_id: node.record.info for node_id, node in self._nodes.items()}

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
        effects = self._keep_rank(job, ready.rank)
        if started and job.state is JobState.RUNNING:
            effects += self._begin(job)
        return [*effects, self._publish(job)]

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
        node = self._of(session)
        if node is None:
            return None, []
        if stale := self._release_stale(session, job_id, epoch):
            return None, stale
        job = self._jobs[job_id]
        if rank >= len(job.ranks) or job.ranks[rank].node_id != node.record.node_id:
            who = f"node {node.record.info.name} ({node.record.node_id})"
            return None, [Note(text=f"{who} spoke for rank {rank} of job {job_id}, which is not its own")]
        return job, []

    def _begin(self, job: JobRecord) -> list[Effect]:
        effects: list[Effect] = [SaveJob(job=job), Note(text=f"job {job.name} ({job.job_id}) runs")]
        return effects + [self._grant(session, node_id, job) for node_id, session in self._sessions(job)]

    def _sessions(self, job: JobRecord) -> Iterator[tuple[NodeId, SessionId]]:
        """The open streams of the job's nodes."""
        for node_id in job.node_ids:
            session = self._nodes[node_id].session
            if session is not None:
                yield node_id, session

    def _keep_rank(self, job: JobRecord, rank: Rank) -> list[Effect]:
        self._jobs[job.job_id] = job
        return [SaveRank(job_id=job.job_id, epoch=job.epoch, rank=job.ranks[rank])]

    # Jobs

    def submit(self, owner: str, spec: JobSpec, now: float) -> tuple[JobRecord, list[Effect]]:
        """Place a job. The same submission of the same owner is the same job.

        Raises:
            PlacementError: the mesh cannot carry it.
            HubProtocolError: the driver's certificate request is refused.
        """
        known = self._by_submission.get((owner, spec.submission))
        if known is not None:
            return self._jobs[known], []
        offers = [self._offer(node) for node in self._nodes.values() if self._is_connected(node, now)]
        places = place(spec, sorted(offers, key=lambda offer: (offer.name, offer.node_id)))
        job_id, epoch = self._new_job_id(), FIRST_EPOCH
        job = JobRecord(
            job_id=job_id,
            owner=owner,
            submission=spec.submission,
            name=spec.name,
            parallel=spec.parallel,
            epoch=epoch,
            state=JobState.PLACED,
            driver_certificate_pem=self._signer.sign(spec.csr_pem, job_id, epoch, DRIVER_RANK),
            ranks=tuple(
                RankRecord(
                    rank=place.rank,
                    node_id=place.node_id,
                    device_id=place.device_id,
                    worker_id=WorkerId(f"{job_id}-{epoch}-{place.rank}"),
                )
                for place in places
            ),
        )
        return job, self._start(job, now)

    def _start(self, job: JobRecord, now: float) -> list[Effect]:
        self._jobs[job.job_id] = job
        self._by_submission[job.owner, job.submission] = job.job_id
        self._live.add(job.job_id)
        self._placed_at[job.job_id] = self._trainer_heard[job.job_id] = now
        effects: list[Effect] = [SaveJob(job=job, new=True)]
        sessions = dict(self._sessions(job))
        effects += [
            Send(session=sessions[rank.node_id], message=jobs.assignment_of(job, rank))
            for rank in job.ranks
            if rank.node_id in sessions
        ]
        names = ", ".join(self._nodes[node_id].record.info.name for node_id in job.node_ids)
        note = f"job {job.name} ({job.job_id}) placed: {len(job.ranks)} workers on {names}"
        return [*effects, self._publish(job), Note(text=note)]

    def job_of(self, owner: str, job_id: JobId) -> JobRecord:
        """Raises: ControlError: no such job. AuthenticationError: it is another trainer's."""
        job = self._jobs.get(job_id)
        if job is None:
            raise ControlError(f"the hub knows no job {job_id}")
        if job.owner != owner:
            raise AuthenticationError(f"job {job_id} belongs to another trainer")
        return job

    def heard_trainer(self, job_id: JobId, now: float) -> None:
        """The job's trainer has shown that it is alive."""
        if job_id in self._trainer_heard:
            self._trainer_heard[job_id] = now

    def end(self, owner: str, job_id: JobId, state: JobState, reason: str) -> list[Effect]:
        """End a job; ending it again changes nothing.

        Raises:
            ControlError, AuthenticationError: as `job_of`.
            ConfigError: `state` is no end.
        """
        if not state.ended:
            raise ConfigError(f"end_job(state={state.value!r}): expected finished, failed or cancelled")
        job = self.job_of(owner, job_id)
        return [] if job.state.ended else self._finish(jobs.ended(job, state, reason))

    def _fail(self, job: JobRecord, reason: str) -> list[Effect]:
        return self._finish(jobs.ended(job, JobState.FAILED, reason))

    def _finish(self, job: JobRecord) -> list[Effect]:
        self._jobs[job.job_id] = job
        self._live.discard(job.job_id)
        self._placed_at.pop(job.job_id, None)
        self._trainer_heard.pop(job.job_id, None)
        effects: list[Effect] = [SaveJob(job=job)]
        release = Release(job_id=job.job_id, epoch=job.epoch, reason=job.reason or job.state.value)
        effects += [Send(session=session, message=release) for _, session in self._sessions(job)]
        note = f"job {job.name} ({job.job_id}) {job.state.value}{': ' + job.reason if job.reason else ''}"
        return [*effects, self._publish(job), Note(text=note)]

    def _publish(self, job: JobRecord) -> Effect:
        return Publish(update=jobs.update_of(job, self._infos(), self._signer.authority_pem))

    def update(self, job: JobRecord) -> Publish:
        """The present state of a job, for a watcher that has just come."""
        return Publish(update=jobs.update_of(job, self._infos(), self._signer.authority_pem))

    # Time

    def tick(self, now: float) -> list[Effect]:
        """Notice who has been silent for too long."""
        effects: list[Effect] = []
        for session, node_id in list(self._by_session.items()):
            heard = self._nodes[node_id].heard_at
            if heard is not None and now - heard >= 2 * self.patience.silence:
                why = Rejected(code="silent", reason=f"no heartbeat for {now - heard:.0f} s")
                effects.append(Disconnect(session=session, why=why))
                effects += self.leave(session, now)
        for job_id in sorted(self._live):
            job = self._jobs[job_id]
            if reason := self._overdue(job, now):
                effects += self._fail(job, reason)
        return effects

    def _overdue(self, job: JobRecord, now: float) -> str | None:
        silence = now - self._trainer_heard[job.job_id]
        if silence >= self.patience.trainer_gone:
            return f"the trainer has not been heard of for {silence:.0f} s"
        if job.state is not JobState.PLACED:
            return None
        for rank in job.ranks:
            node = self._nodes[rank.node_id]
            if node.session is None and now - node.gone_since > self.patience.node_gone:
                gone = now - node.gone_since
                return f"node {node.record.info.name} of rank {rank.rank} has been gone for {gone:.0f} s"
        waited = now - self._placed_at[job.job_id]
        if waited < self.patience.workers_ready:
            return None
        late = ", ".join(
            f"rank {rank.rank} on {self._nodes[rank.node_id].record.info.name}" for rank in jobs.not_ready(job)
        )
        return f"workers were not ready within {waited:.0f} s: {late}"


def _why_stale(job: JobRecord | None, epoch: Epoch) -> str:
    if job is None:
        return "the hub knows no such job"
    if job.state.ended:
        return job.reason or f"the job is {job.state.value}"
    return f"the job's epoch is {job.epoch}, not {epoch}"


def _lost(job: JobRecord, rank: RankRecord) -> WorkerChange:
    return WorkerChange(
        job_id=job.job_id,
        epoch=job.epoch,
        rank=rank.rank,
        state=WorkerState.EXITED,
        restarts=rank.restarts,
        reason="its node came back without it",
    )
