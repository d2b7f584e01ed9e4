"""The trainer's side of a job: placed by the hub, then commanded over the data plane."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from distensor.comm.identity import new_key_and_csr
from distensor.core import DRIVER_RANK, Clock, Epoch, JobId, ParallelConfig, Rank
from distensor.core.control import JobSpec, JobState, JobUpdate, Member, Topology, WorkerChange, WorkerState
from distensor.core.errors import (
    DistensorError,
    FrameError,
    HubProtocolError,
    JobFailedError,
    PeerLostError,
    PlacementError,
    ProgramRejectedError,
    TransportError,
    WorkerFailedError,
    WorkerLostError,
)
from distensor.training.replies import Reply
from distensor.training.snapshot_reading import SnapshotReader
from distensor.transport import (
    Channel,
    Credentials,
    DataPlane,
    FrameLimits,
    LinkStats,
    LocalMeeting,
    PeerId,
    Tag,
    Timeouts,
    places_at,
    relay_at,
)
from distensor.transport.driver import ABORT_SEQUENCE, PART_BYTES, Command, ReplyCode, finish_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.comm import HubClient

OWN_WORDS_SECONDS = 0.3
"""How long to look for a worker's own report once it is known to be gone: what it sent has arrived by then."""

EXIT_REASON_SECONDS = 5.0
"""How long a lost worker's supervisor gets to say why it died, before the error goes out without the reason."""

END_SECONDS = 10.0
"""How long the workers get to say goodbye; the hub takes them back anyway."""

LONGEST_MESSAGE = 2000
"""Characters of a worker's own words that an error quotes."""


class JobHub(Protocol):
    """What a job asks of the hub's client."""

    def watch_job(self, job_id: JobId) -> Iterator[JobUpdate]: ...

    def end_job(self, job_id: JobId, state: JobState, reason: str = "") -> None: ...


class JobWatch:
    """Follows a job's updates in a thread; others wait on what they need."""

    def __init__(self, client: JobHub, job_id: JobId, clock: Clock) -> None:
        self._client = client
        self._job_id = job_id
        self._clock = clock
        self._changed = threading.Condition()
        self._latest: JobUpdate | None = None
        self._error: DistensorError | None = None
        self._over = False
        self._thread = threading.Thread(target=self._follow, name=f"watch-{job_id}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for update in self._client.watch_job(self._job_id):
                with self._changed:
                    self._latest = update
                    self._changed.notify_all()
        except DistensorError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a bug must be raised where somebody waits, not in this thread
            self._error = HubProtocolError(f"following job {self._job_id} failed: {error!r}")
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, wanted: Callable[[JobUpdate], bool], timeout: float) -> JobUpdate | None:
        """The first update, the present one included, for which `wanted` holds; None at the end of the time.

        Raises:
            DistensorError: the hub refused the watch.
        """
        deadline = self._clock.monotonic() + timeout
        with self._changed:
            while True:
                if self._latest is not None and wanted(self._latest):
                    return self._latest
                if self._error is not None:
                    raise self._error
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0 or self._over:
                    return None
                self._changed.wait(min(remaining, 0.5))

    @property
    def over(self) -> bool:
        """Nothing more will come: the job has ended, or the client was closed."""
        with self._changed:
            return self._over

    @property
    def latest(self) -> JobUpdate | None:
        with self._changed:
            return self._latest


class JobConnection:
    """A placed job whose workers are all connected to this trainer.

    Use `JobConnection.open`. Commands go to every rank; the answer to each is awaited from every rank.
    """

    def __init__(
        self,
        *,
        client: JobHub,
        watch: JobWatch,
        plane: DataPlane,
        topology: Topology,
        clock: Clock,
        exit_reason_seconds: float = EXIT_REASON_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        self._client = client
        self._watch = watch
        self._plane = plane
        self._clock = clock
        self._exit_reason_seconds = exit_reason_seconds
        self._end_seconds = end_seconds
        self._sequence = 0
        self._state = JobState.RUNNING
        self.topology = topology
        self.snapshots = SnapshotReader(plane)

    @classmethod
    def open(
        cls,
        *,
        client: HubClient,
        name: str,
        parallel: ParallelConfig,
        bytes_per_rank: tuple[int, ...],
        largest_tensor: int,
        clock: Clock,
        timeouts: Timeouts,
        start_timeout: float,
    ) -> JobConnection:
        """Submit, wait until every worker is ready, connect to all.

        `largest_tensor` (bytes) bounds what a worker may make this process hold at once.

        Raises:
            PlacementError: more ranks than free workers, or no worker got ready in time.
            JobFailedError: the hub gave the job up.
            HubUnreachableError, AuthenticationError: as the hub client does.
            HandshakeError, TransportTimeoutError: a worker could not be reached.
        """
        # The job's id is not known yet; the hub puts the right identity into the certificate whatever we ask for.
        key_pem, csr_pem = new_key_and_csr(JobId("new"), None, DRIVER_RANK)
        spec = JobSpec(
            submission=uuid.uuid4().hex, name=name, parallel=parallel, csr_pem=csr_pem, bytes_per_rank=bytes_per_rank
        )
        job_id, epoch = client.submit_job(spec)
        watch = JobWatch(client, job_id, clock)
        try:
            update = wait_until_running(watch, job_id, start_timeout)
            plane = _dial(update, job_id, epoch, key_pem, timeouts, _limits(largest_tensor), clock)
        except BaseException as error:  # whatever went wrong, an interrupt included, the slots must not stay taken
            with contextlib.suppress(DistensorError):
                client.end_job(job_id, JobState.FAILED, f"the trainer could not start it: {error}")
            raise
        topology = update.topology
        assert topology is not None
        return cls(client=client, watch=watch, plane=plane, topology=topology, clock=clock)

    @property
    def job_id(self) -> JobId:
        return self.topology.job_id

    @property
    def epoch(self) -> Epoch:
        return self.topology.epoch

    @property
    def ranks(self) -> range:
        return range(self.topology.parallel.world_size)

    @property
    def restarts(self) -> int:
        """How often workers of this job were restarted, as far as the hub knows."""
        latest = self._watch.latest
        return 0 if latest is None else sum(change.restarts for change in latest.workers)

    def stats(self) -> Mapping[int, LinkStats]:
        return self._plane.stats()

    def command(
        self,
        command: Command,
        meta: Mapping[str, Any],
        tensors: Mapping[int, Mapping[str, Tensor]] | None = None,
        extra: Mapping[int, Mapping[str, Any]] | None = None,
        most_bytes: Mapping[int, int] | None = None,
    ) -> list[Reply]:
        """Send one command to all ranks and wait for all answers, in rank order.

        `tensors` and `extra` (meta data) are per rank, and so are the most bytes of tensors that an answer may hold;
        by default none.

        Raises:
            WorkerLostError: a worker ended or fell silent; names rank, node and, where known, the exit reason.
            WorkerFailedError: a worker reported an error of its own, or answered what is no answer.
            ProgramRejectedError: a worker refused its program.
        """
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            for rank in self.ranks:
                own = {**meta, **((extra or {}).get(rank, {})), "command": command.value}
                send_named(self._plane, rank, Channel.CONTROL, sequence, own, (tensors or {}).get(rank, {}))
            return self._collect(sequence, most_bytes or {}, None)
        except PeerLostError as error:
            raise self._lost(error) from error

    def _collect(self, sequence: int, most_bytes: Mapping[int, int], timeout: float | None) -> list[Reply]:
        replies: dict[int, Reply] = {}
        while len(replies) < len(self.ranks):
            rank, tag, first = self._plane.recv_any(Channel.REPLY, timeout)
            try:
                if tag != Tag(channel=Channel.REPLY, step=sequence) or rank in replies:
                    raise FrameError(f"an answer nobody asked for ({tag}); this is command {sequence}")
                most = most_bytes.get(rank, 0)
                meta, tensors = finish_named(self._plane, rank, Channel.REPLY, sequence, first, timeout, most=most)
            except FrameError as error:
                raise WorkerFailedError(f"{self.who(rank)}: {error}") from error
            if meta.get("code") != ReplyCode.OK:
                raise self._failure(rank, meta)
            replies[rank] = Reply(rank=rank, who=self.who(rank), meta=meta, tensors=tensors)
        return [replies[rank] for rank in self.ranks]

    def _failure(self, rank: int, meta: Mapping[str, Any]) -> DistensorError:
        message = f"{self.who(rank)}: {str(meta.get('message'))[:LONGEST_MESSAGE]}"
        match meta.get("code"):
            case ReplyCode.PEER_LOST:
                peer = meta.get("peer")
                return self._lost(
                    PeerLostError(peer if isinstance(peer, int) and peer in self.ranks else rank, message)
                )
            case ReplyCode.REFUSED_PROGRAM:
                return ProgramRejectedError(message)
            case _:
                return WorkerFailedError(message)

    def _lost(self, error: PeerLostError) -> DistensorError:
        """Name the worker that is gone, with the reason that its supervisor gave the hub.

        A worker that said itself what went wrong comes first: its leaving is only the consequence.
        """
        said = self._own_words(error.rank)
        if said is not None:
            return said

        def ended(update: JobUpdate) -> bool:
            return self._exit_of(update, error.rank) is not None

        try:
            update = self._watch.wait_for(ended, self._exit_reason_seconds)
        except DistensorError:
            update = None  # a hub that is away must not hide the loss itself
        change = None if update is None else self._exit_of(update, error.rank)
        if change is None:
            rank, why = error.rank, f"{error.reason}; its supervisor has given no reason"
        else:
            rank, why = change.rank, change.reason
        return WorkerLostError(
            f"job {self.topology.job_name!r} lost {self.who(rank)}: {why}. "
            "This version cannot replace a worker in a running job; start the job again"
        )

    def _own_words(self, rank: int) -> DistensorError | None:
        """The error that the lost worker reported and that is still unread, because others noticed its end before."""
        tag = Tag(channel=Channel.REPLY, step=self._sequence - 1)
        with contextlib.suppress(TransportError):
            first = self._plane.recv(rank, tag, OWN_WORDS_SECONDS)
            meta, _ = finish_named(self._plane, rank, Channel.REPLY, tag.step, first, OWN_WORDS_SECONDS, most=0)
            if meta.get("code") not in (ReplyCode.OK, ReplyCode.PEER_LOST):
                return self._failure(rank, meta)
        return None

    def _exit_of(self, update: JobUpdate, rank: int) -> WorkerChange | None:
        """What is said of `rank`, or of another rank of this job: the loss of one may reach us through another."""
        gone = (WorkerState.EXITED, WorkerState.BACKOFF, WorkerState.BROKEN)
        changes = [
            change
            for change in update.workers
            if change.rank in self.ranks and change.reason and (change.state in gone or change.restarts > 0)
        ]
        return min(changes, key=lambda change: change.rank != rank, default=None)

    def member(self, rank: int) -> Member:
        return next(member for member in self.topology.members if member.rank == rank)

    def who(self, rank: int) -> str:
        """Rank and node, as errors name a worker."""
        return f"rank {rank} on node {self.member(rank).node_name!r}"

    def end(self, state: JobState, reason: str = "") -> None:
        """Tell workers and hub that the job is over. Safe to call twice; an unreachable hub is not an error."""
        if self._state.ended:
            return
        self._state = state
        sequence = self._sequence
        command = Command.END if state is JobState.FINISHED else Command.ABORT
        number = sequence if command is Command.END else ABORT_SEQUENCE
        for rank in self.ranks:
            with contextlib.suppress(TransportError):
                send_named(self._plane, rank, Channel.CONTROL, number, {"command": command.value}, {})
        if state is JobState.FINISHED:
            with contextlib.suppress(DistensorError):
                self._collect(sequence, {}, self._end_seconds)
        with contextlib.suppress(DistensorError):
            self._client.end_job(self.job_id, state, reason)
        self._plane.close()


def wait_until_running(watch: JobWatch, job_id: JobId, timeout: float) -> JobUpdate:
    update = watch.wait_for(lambda seen: seen.state is not JobState.PLACED, timeout)
    if update is None and watch.over:
        raise JobFailedError(f"job {job_id}: the hub says nothing more of it; the session may have been closed")
    if update is None:
        waiting = watch.latest
        states = "" if waiting is None else ", ".join(f"rank {c.rank} {c.state.value}" for c in waiting.workers)
        raise PlacementError(
            f"job {job_id}: not all workers were ready after {timeout:.0f} s ({states or 'none has said anything'}); "
            "look at the dashboard of the nodes"
        )
    if update.state is not JobState.RUNNING or update.topology is None or update.certificate is None:
        raise JobFailedError(f"job {job_id} is {update.state.value}: {update.reason or 'no reason given'}")
    return update


def _limits(largest_tensor: int) -> FrameLimits:
    """A message holds one part, or one tensor where that is larger."""
    body = max(4 * PART_BYTES, 2 * largest_tensor)
    return FrameLimits(body=body, queued=body)


def _dial(
    update: JobUpdate,
    job_id: JobId,
    epoch: Epoch,
    key_pem: bytes,
    timeouts: Timeouts,
    limits: FrameLimits,
    clock: Clock,
) -> DataPlane:
    topology, certificate = update.topology, update.certificate
    assert topology is not None
    assert certificate is not None
    return DataPlane.open(
        me=PeerId(job_id=job_id, epoch=epoch, rank=Rank(DRIVER_RANK)),
        credentials=Credentials(
            key_pem=key_pem,
            certificate_pem=certificate.certificate_pem,
            authority_pem=certificate.authority_pem,
        ),
        listener=None,
        peers={m.rank: places_at((m.host, *m.hosts), m.port) for m in topology.members},
        timeouts=timeouts,
        limits=limits,
        clock=clock,
        local=LocalMeeting(),
        relay=relay_at(topology.relay),
    )
