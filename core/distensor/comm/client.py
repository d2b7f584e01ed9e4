"""The trainer's side of the control plane: plain blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from distensor.comm import codec, job_codec, progress_codec
from distensor.comm.address import HubAddress
from distensor.comm.backoff import Backoff
from distensor.comm.bootstrap import fetch_authority
from distensor.comm.channels import MAX_UNITS_PER_MESSAGE, bearer, open_channel
from distensor.comm.failures import UNREACHABLE, error_of_status
from distensor.comm.link_identity import ONE_OF_SEVERAL_SECONDS
from distensor.comm.tokens import Role, decode_token
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.control import JobSpec, JobState, JobUpdate, Mesh, Reconfiguration, TakeOver, Unit
from distensor.core.errors import AuthenticationError, ControlError, HubUnreachableError
from distensor.core.ids import Epoch, JobId
from distensor.core.job_report import JobQuery, JobReport, JobsPage
from distensor.core.parallel import ParallelConfig
from distensor.core.progress import StepProgress
from distensor.proto import control_pb2 as pb
from distensor.proto.control_pb2_grpc import ControlStub

ALL_JOBS = JobQuery()


class HubClient:
    """Calls to one hub. May be used from several threads; every call may be repeated safely.

    A call waits for a hub that is restarting until `timeout` is over. Where the token has several addresses, one that
    does not answer is left for the next.

    Raises:
        AuthenticationError: the token cannot be read, or is one for nodes.
    """

    def __init__(self, token: str, *, timeout: float = 10.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._token = decode_token(token)
        if self._token.role is not Role.TRAINER:
            raise AuthenticationError("this join token is for a node; a trainer needs the trainer token")
        self._timeout = timeout
        self._clock = clock
        self._metadata = bearer("trainer", self._token.secret)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._turn = 0
        self._watches: set[Any] = set()
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        """Where the hub was last, or is looked for."""
        return str(self._present())

    def _present(self) -> HubAddress:
        return self._token.addresses[self._turn % len(self._token.addresses)]

    def query_mesh(self) -> Mesh:
        return codec.read_mesh(self._call("QueryMesh", pb.QueryMeshRequest()))

    def submit_job(self, spec: JobSpec) -> tuple[JobId, Epoch]:
        """Place the job. The same `spec.submission` sent again is the same job.

        Raises:
            PlacementError: the mesh cannot carry it; the message has both numbers.
        """
        reply = self._call("SubmitJob", codec.write_spec(spec))
        return JobId(reply.job_id), Epoch(reply.epoch)

    def reconfigure_job(self, change: Reconfiguration) -> Epoch:
        """Give a running job other members; returns their epoch. The same `change.request` sent again is the same one.

        Raises:
            PlacementError: there is no place for a new rank.
            StaleEpochError: `change.epoch` is not the present one.
            ControlError: the job has ended.
        """
        return Epoch(self._call("ReconfigureJob", codec.write_reconfiguration(change)).epoch)

    def take_over_job(self, taken: TakeOver) -> tuple[Epoch, ParallelConfig]:
        """Begin an epoch of the same ranks with this process as their trainer; returns it and their mesh. The same
        `taken.request` sent again is the same epoch.

        Raises:
            JobHeldError: the hub hears the job's trainer.
            AuthenticationError: the job is another account's.
            ControlError: there is no such job, or it has ended.
        """
        reply = self._call("TakeOverJob", codec.write_take_over(taken))
        return Epoch(reply.epoch), codec.read_parallel(reply.parallel)

    def report_units(self, units: Sequence[Unit]) -> None:
        """Give receipts for finished units; returns when they are in the hub's books."""
        for start in range(0, len(units), MAX_UNITS_PER_MESSAGE):
            part = units[start : start + MAX_UNITS_PER_MESSAGE]
            self._call("ReportUnits", codec.write_receipts(part))

    def report_progress(self, job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress]) -> None:
        """Tell how a run goes, at most `core.progress.MOST_STEPS` steps at once. The hub keeps it in memory only."""
        self._call("ReportProgress", progress_codec.write_progress(job_id, epoch, steps))

    def object_to(self, units: Sequence[Unit]) -> None:
        """Say that others computed something else than who did these units: the hub holds the work of that node in the
        job until its operator decides. Returns when it is in the hub's books; repeating it changes nothing."""
        for start in range(0, len(units), MAX_UNITS_PER_MESSAGE):
            part = units[start : start + MAX_UNITS_PER_MESSAGE]
            self._call("ReportUnits", codec.write_receipts((), part))

    def list_jobs(self, query: JobQuery = ALL_JOBS) -> JobsPage:
        """One page of this account's jobs, or, by an admin's key, of all accounts'."""
        return job_codec.read_page(self._call("ListJobs", job_codec.write_query(query)))

    def explain_job(self, job_id: JobId) -> JobReport:
        """Where the ranks of a job are and why, or what a job that waits is waiting for.

        Raises:
            ControlError: the hub knows no such job of this account.
        """
        return job_codec.read_report(self._call("ExplainJob", job_codec.write_explain(job_id)))

    def end_job(self, job_id: JobId, state: JobState, reason: str = "", epoch: Epoch | None = None) -> None:
        """End a job; `epoch` is the one that the caller is in.

        Raises:
            StaleEpochError: another trainer has taken the job over since.
        """
        self._call("EndJob", codec.write_end(job_id, state, reason, epoch))

    def watch_job(self, job_id: JobId) -> Iterator[JobUpdate]:
        """The job's present state and every change until it has ended or this client is closed.

        While the hub is away the iterator waits and connects again; it does not raise for that.
        """
        backoff = Backoff()
        last: JobUpdate | None = None
        while not self._closed.is_set():
            try:
                for update in self._watch_once(job_id):
                    backoff.reset()
                    if update != last:
                        last = update
                        yield update
                    if update.state.ended:
                        return
            except HubUnreachableError:  # the hub restarts; what it acknowledged it still has
                self._leave(self._channel)
            self._closed.wait(backoff.next_delay())

    def close(self) -> None:
        """End every watch and the connection. May be called from another thread, and twice."""
        self._closed.set()
        with self._lock:
            watches, self._watches = self._watches, set()
            channel, self._channel = self._channel, None
        for watch in watches:
            watch.cancel()
        if channel is not None:
            channel.close()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch_once(self, job_id: JobId) -> Iterator[JobUpdate]:
        stub = ControlStub(self._open())  # type: ignore[no-untyped-call]  # generated
        call = stub.WatchJob(codec.write_watch(job_id), metadata=self._metadata, wait_for_ready=False)
        with self._lock:
            self._watches.add(call)
        try:
            if self._closed.is_set():
                return
            for message in call:
                yield codec.read_update(message)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()
            with self._lock:
                self._watches.discard(call)

    def _call(self, name: str, request: Any) -> Any:
        deadline = self._clock.monotonic() + self._timeout
        backoff = Backoff()
        while True:
            channel = None
            try:
                channel = self._open()
                return self._ask(channel, name, request, deadline)
            except HubUnreachableError:  # no connection to this address
                if not self._several or self._too_late(backoff, deadline):
                    raise
                self._leave(channel)
            except grpc.RpcError as error:
                if error.code() not in self._passing or self._too_late(backoff, deadline):
                    raise self._failure(error) from error
                self._leave(channel)
            except ValueError as error:  # grpc's word for a channel that was closed meanwhile
                if self._closed.is_set() or not self._several or self._too_late(backoff, deadline):
                    raise HubUnreachableError(f"this client of the hub at {self.address} has been closed") from error

    def _ask(self, channel: grpc.Channel, name: str, request: Any, deadline: float) -> Any:
        method: Callable[..., Any] = getattr(ControlStub(channel), name)  # type: ignore[no-untyped-call]  # generated
        remaining = max(0.05, deadline - self._clock.monotonic())
        seconds = min(remaining, ONE_OF_SEVERAL_SECONDS) if self._several else remaining
        return method(request, timeout=seconds, metadata=self._metadata, wait_for_ready=True)

    @property
    def _several(self) -> bool:
        return bool(self._token.others)

    @property
    def _passing(self) -> frozenset[grpc.StatusCode]:
        """After which a call is made again: of several hubs one that does not answer may be the wrong one."""
        return UNREACHABLE if self._several else frozenset({grpc.StatusCode.UNAVAILABLE})

    def _too_late(self, backoff: Backoff, deadline: float) -> bool:
        """Wait before the next attempt, unless there is no time for one."""
        delay = backoff.next_delay()
        if self._closed.is_set() or self._clock.monotonic() + delay >= deadline:
            return True
        self._clock.sleep(delay)
        return False

    def _leave(self, channel: grpc.Channel | None) -> None:
        """Look for the hub at its next address, unless another thread has done so already."""
        if not self._several:
            return
        with self._lock:
            if self._channel is not channel:
                return
            self._turn += 1
            self._channel = None
        if channel is not None:
            channel.close()

    def _open(self) -> grpc.Channel:
        """The channel; the first time, after the hub has shown the authority that the token names."""
        with self._lock:
            if self._closed.is_set():
                raise HubUnreachableError(f"this client of the hub at {self.address} has been closed")
            if self._channel is None:
                address = self._present()
                seconds = min(self._timeout, ONE_OF_SEVERAL_SECONDS) if self._several else self._timeout
                authority = fetch_authority(address, self._token.fingerprint, seconds)
                self._channel = open_channel(address, authority)
            return self._channel

    def _failure(self, error: Any) -> ControlError:
        if error.code() in UNREACHABLE and self._closed.is_set():
            return HubUnreachableError(f"this client of the hub at {self.address} has been closed")
        return error_of_status(error.code(), error.details() or "", self._present())
