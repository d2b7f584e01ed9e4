"""The trainer's side of a job: placed by the hub, then commanded over the data plane."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distensor.comm.identity import new_key_and_csr
from distensor.core import DRIVER_RANK, Clock, Epoch, JobId, ParallelConfig
from distensor.core.control import (
    JobSpec,
    JobState,
    JobUpdate,
    Member,
    Reconfiguration,
    Topology,
    WorkerChange,
    WorkerState,
)
from distensor.core.errors import (
    ConfigError,
    ControlError,
    DistensorError,
    FrameError,
    HubUnreachableError,
    PeerLostError,
    ProgramRejectedError,
    TransportError,
    WorkerFailedError,
    WorkerLostError,
)
from distensor.core.regrouping import Regrouping, renumbered
from distensor.training.dialing import DEFAULT_DIALING, Dialing, dial, frame_limits
from distensor.training.job_watch import JobHub, JobWatch, wait_until_running
from distensor.training.next_epoch import check_members, meet, wait_for_members
from distensor.training.replies import Reply
from distensor.training.snapshot_reading import SnapshotReader
from distensor.transport import (
    Channel,
    DataPlane,
    LinkStats,
    Tag,
    Timeouts,
)
from distensor.transport.driver import ABORT_SEQUENCE, Command, ReplyCode, finish_named, send_named

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

SPLIT_TENSOR = "DISTENSOR_SPLIT_TENSOR"
"""Set to 1 it lets the hub split a tensor-parallel group over machines in several networks."""

STEPS = "DISTENSOR_STEPS"
"""How many steps a job will take at most: what a hub that demands deposits quotes it by."""
MOST_STEPS = 10**9

NOTICE_SECONDS = 0.5
"""How long to look for the rank that is gone, where at first only ranks are known that left because of it."""

_LEAVING = frozenset({WorkerState.DRAINING, WorkerState.EXITED, WorkerState.BACKOFF, WorkerState.BROKEN})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A change of members, as it is repeated until the hub answers."""

    change: Reconfiguration
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The newest epoch that the hub was asked for."""

    epoch: Epoch
    parallel: ParallelConfig
    key_pem: bytes = field(repr=False)


def planned_steps(environment: Mapping[str, str]) -> int:
    """How many steps the environment says that a job will take at most; 0 where it says nothing.

    Raises:
        ConfigError: it is no whole number.
    """
    text = environment.get(STEPS, "")
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_STEPS:
        raise ConfigError(f"{STEPS}={text[:40]!r}: expected a whole number from 1 to {MOST_STEPS}")
    return int(text)


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
        dialing: Dialing = DEFAULT_DIALING,
        exit_reason_seconds: float = EXIT_REASON_SECONDS,
        end_seconds: float = END_SECONDS,
        aggregators: tuple[str, ...] = (),
    ) -> None:
        self._client = client
        self._watch = watch
        self._plane = plane
        self._clock = clock
        self._end_seconds = end_seconds
        self._sequence = 0
        self._state = JobState.RUNNING
        self._dialing = dialing
        self._accused: set[int] = set()
        self._last_loss: PeerLostError | None = None
        self._asked = _Asked(epoch=topology.epoch, parallel=topology.parallel, key_pem=b"")
        self._unanswered: _Request | None = None
        self._earlier = (0, 0)
        self.exit_reason_seconds = exit_reason_seconds
        self._aggregators = aggregators
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
        aggregators: tuple[str, ...] = (),
        micro_batches: int = 0,
        wait: bool = False,
        priority: int = 0,
    ) -> JobConnection:
        """Submit, wait until every worker is ready, connect to all.

        `largest_tensor` (bytes) bounds what a worker may make this process hold at once. The last four: see
        `JobSpec`.

        Raises:
            PlacementError: more ranks than free workers, or no worker got ready in time.
            JobFailedError: the hub gave the job up.
            ConfigError: DISTENSOR_STEPS is no number of steps.
            HubUnreachableError, AuthenticationError: as the hub client does.
            HandshakeError, TransportTimeoutError: a worker could not be reached.
        """
        # The job's id is not known yet; the hub puts the right identity into the certificate whatever we ask for.
        key_pem, csr_pem = new_key_and_csr(JobId("new"), None, DRIVER_RANK)
        spec = JobSpec(
            submission=uuid.uuid4().hex,
            name=name,
            parallel=parallel,
            csr_pem=csr_pem,
            bytes_per_rank=bytes_per_rank,
            aggregators=aggregators,
            split_tensor=os.environ.get(SPLIT_TENSOR) == "1",
            steps=planned_steps(os.environ),
            micro_batches=micro_batches,
            wait=wait,
            priority=priority,
        )
        job_id, epoch = client.submit_job(spec)
        watch = JobWatch(client, job_id, clock)
        try:
            update = wait_until_running(watch, job_id, start_timeout)
            dialing = Dialing(timeouts=timeouts, limits=frame_limits(largest_tensor))
            plane = dial(update, job_id, epoch, key_pem, dialing, clock)
        except BaseException as error:  # whatever went wrong, an interrupt included, the slots must not stay taken
            with contextlib.suppress(DistensorError):
                client.end_job(job_id, JobState.FAILED, f"the trainer could not start it: {error}")
            raise
        topology = update.topology
        assert topology is not None
        return cls(
            client=client,
            watch=watch,
            plane=plane,
            topology=topology,
            clock=clock,
            dialing=dialing,
            aggregators=aggregators,
        )

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
        only: Collection[int] | None = None,
    ) -> list[Reply]:
        """Send one command to all ranks, or to those of `only`, and wait for all answers, in rank order. The others are
        told to pass: all ranks number commands alike, and what they say to each other by these numbers.

        `tensors` and `extra` (meta data) are per rank, and so are the most bytes of tensors that an answer may hold;
        by default none.

        Raises:
            WorkerLostError: a worker ended or fell silent; names rank, node and, where known, the exit reason.
            WorkerFailedError: a worker reported an error of its own, or answered what is no answer.
            ProgramRejectedError: a worker refused its program.
        """
        sequence, self._sequence = self._sequence, self._sequence + 1
        asked = set(self.ranks if only is None else only)
        try:
            for rank in self.ranks:
                own = {**meta, **((extra or {}).get(rank, {})), "command": command.value}
                own = own if rank in asked else {"command": Command.PASS.value}
                send_named(self._plane, rank, Channel.CONTROL, sequence, own, (tensors or {}).get(rank, {}))
            replies = self._collect(sequence, most_bytes or {}, None, self.ranks)
            return [reply for reply in replies if reply.rank in asked]
        except PeerLostError as error:
            raise self._lost(error) from error

    def _collect(
        self, sequence: int, most_bytes: Mapping[int, int], timeout: float | None, ranks: Sequence[int]
    ) -> list[Reply]:
        replies: dict[int, Reply] = {}
        while len(replies) < len(ranks):
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
        return [replies[rank] for rank in ranks]

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
        self._accused.add(error.rank)
        said = self._own_words(error.rank)
        return self.loss_of(error) if said is None else said

    def loss_of(self, error: PeerLostError, patience: float | None = None) -> WorkerLostError:
        """The loss in words. `patience`: how long to wait for the reason; by default `exit_reason_seconds`."""
        self._last_loss = error

        def ended(update: JobUpdate) -> bool:
            return self._exit_of(update, error.rank) is not None

        try:
            update = self._watch.wait_for(ended, self.exit_reason_seconds if patience is None else patience)
        except DistensorError:
            update = None  # a hub that is away must not hide the loss itself
        change = None if update is None else self._exit_of(update, error.rank)
        if change is None:
            rank, why = error.rank, f"{error.reason}; its supervisor has given no reason"
        else:
            rank, why = change.rank, change.reason
        return WorkerLostError(f"job {self.topology.job_name!r} lost {self.who(rank)}: {why}")

    def explained(self, error: WorkerLostError) -> WorkerLostError:
        """`error`, with the reason of the newest loss where its supervisor tells it within some seconds."""
        return error if self._last_loss is None else self.loss_of(self._last_loss, EXIT_REASON_SECONDS)

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
            if change.epoch == self.epoch and change.reason and (change.state in gone or change.restarts > 0)
        ]
        return min(changes, key=lambda change: change.rank != rank, default=None)

    # -- other members ---------------------------------------------------------------------------------------------

    def gone(self) -> set[int]:
        """The ranks that are lost or leave, once at least one is known. Ranks that only left because of them are not
        among them."""
        deadline = self._clock.monotonic() + NOTICE_SECONDS
        while True:
            departed = self._plane.departed()
            found = (self._plane.lost().keys() - departed) | self._leaving()
            if found := found & set(self.ranks):
                return found
            if self._clock.monotonic() >= deadline:
                return (self._accused - departed) & set(self.ranks)
            self._clock.sleep(0.005)

    def _leaving(self) -> set[int]:
        latest = self._watch.latest
        if latest is None or latest.epoch != self.epoch:
            return set()
        return {int(change.rank) for change in latest.workers if change.state in _LEAVING}

    @property
    def asked_parallel(self) -> ParallelConfig:
        """The mesh of the newest epoch that the hub was asked for; that of the present one where it was not."""
        return self._asked.parallel

    @property
    def asked(self) -> bool:
        """Whether the hub was asked for an epoch after the present one."""
        return self._asked.epoch != self.epoch

    def leave(self) -> None:
        """Part from the ranks of the present epoch; healthy ones notice, and wait for the next."""
        stats = self._plane.stats().values()
        sent, received = self._earlier
        self._earlier = (
            sent + sum(link.bytes_sent for link in stats),
            received + sum(link.bytes_received for link in stats),
        )
        self._plane.close()

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that left and reached this trainer so far, over all epochs."""
        stats = () if self._plane.closed else self._plane.stats().values()
        sent, received = self._earlier
        return sent + sum(link.bytes_sent for link in stats), received + sum(link.bytes_received for link in stats)

    def ask_for(self, regrouping: Regrouping, bytes_per_rank: tuple[int, ...] = ()) -> None:
        """Have the hub begin the next epoch. The ranks of `regrouping.continues` are those of the newest epoch that
        was asked for.

        Raises:
            PlacementError: there is no place for a new worker.
            HubUnreachableError, ControlError: as the hub's client does.
        """
        if (earlier := self._unanswered) is not None:  # the hub may have done it: without it our epoch would be stale
            self._ask(earlier)
            if (earlier.change.parallel, earlier.change.continues) == (regrouping.parallel, regrouping.continues):
                return
            regrouping = renumbered(regrouping, earlier.change.continues)
        key_pem, csr_pem = new_key_and_csr(self.job_id, None, DRIVER_RANK)
        change = Reconfiguration(
            job_id=self.job_id,
            request=uuid.uuid4().hex,
            epoch=self._asked.epoch,
            parallel=regrouping.parallel,
            continues=regrouping.continues,
            csr_pem=csr_pem,
            bytes_per_rank=bytes_per_rank,
            aggregators=self._aggregators,
        )
        self._ask(_Request(change=change, key_pem=key_pem))

    def _ask(self, request: _Request) -> None:
        self._unanswered = request
        try:
            epoch = self._client.reconfigure_job(request.change)
        except HubUnreachableError:
            raise
        except ControlError:
            self._unanswered = None
            raise
        self._unanswered = None
        self._asked = _Asked(epoch=epoch, parallel=request.change.parallel, key_pem=request.key_pem)

    def is_next_ready(self) -> bool:
        """Whether all ranks of the epoch that was asked for wait to be met.

        Raises:
            MembersMissingError: one of them cannot be started.
        """
        latest = self._watch.latest
        if latest is None or latest.epoch != self._asked.epoch:
            return False
        check_members(latest)
        return latest.state is not JobState.PLACED

    def enter_next(self, timeout: float) -> None:
        """Wait until the ranks of the epoch that was asked for are ready, part from the present ones and meet those.

        Raises:
            MembersMissingError: ranks that are not ready in time, or cannot be met.
            JobFailedError: the hub has ended the job.
        """
        asked = self._asked
        update = wait_for_members(self._watch, self.job_id, asked.epoch, asked.parallel.world_size, timeout)
        if not self._plane.closed:
            self.leave()
        self._meet(update)

    def _meet(self, update: JobUpdate) -> None:
        assert update.topology is not None
        plane = meet(update, self.job_id, self._asked.key_pem, self._dialing.later(), self._clock)
        self._plane, self.topology = plane, update.topology
        self._sequence, self._accused = 0, set()
        self.snapshots = SnapshotReader(plane)

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
                self._collect(sequence, {}, self._end_seconds, self.ranks)
        with contextlib.suppress(DistensorError):
            self._client.end_job(self.job_id, state, reason, self._asked.epoch)
        self._plane.close()
