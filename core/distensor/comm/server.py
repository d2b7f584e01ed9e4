"""The hub's side of the wire: a gRPC server that speaks in plain values to a `ControlService`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from distensor.comm import codec, job_codec, progress_codec, statement_codec
from distensor.comm.address import HubAddress
from distensor.comm.channels import EOF, MAX_UNITS_PER_MESSAGE, SERVER_OPTIONS
from distensor.comm.failures import status_of_error
from distensor.comm.messages import HubToNode, NodeToHub, Register, Rejected
from distensor.comm.stream_codec import read_node_message, write_hub_message
from distensor.core.control import JobSpec, JobState, JobUpdate, Mesh, Reconfiguration, TakeOver, Unit
from distensor.core.errors import AuthenticationError, ControlError, DistensorError, HubProtocolError
from distensor.core.ids import Epoch, JobId
from distensor.core.job_report import JobQuery, JobReport, JobsPage
from distensor.core.parallel import ParallelConfig
from distensor.core.progress import StepProgress
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery
from distensor.proto import control_pb2 as pb
from distensor.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

REGISTER_SECONDS = 10.0
MOST_QUEUED = 5000
STOP_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bearer:
    """What a caller shows: a kind of identity and its parts, the last of which is a secret."""

    kind: str
    parts: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Bearer(kind={self.kind!r})"


NOTHING_SHOWN = Bearer(kind="nothing", parts=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """Whom the hub has recognised. `subject` is a node id, a trainer's account, or the id of what one joins by.

    `kind` and `scopes` are words of the hub's own table; `host` is where the caller is seen.
    """

    kind: str
    subject: str
    account: str = ""
    key: str = ""
    scopes: frozenset[str] = frozenset()
    expires_at: float | None = None
    host: str = ""


class NodeSession:
    """One open stream. Compared by identity; `send` never blocks."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._queue: asyncio.Queue[HubToNode | None] = asyncio.Queue()
        self._closed = False

    def send(self, message: HubToNode) -> None:
        """Queue a message. A node that reads too slowly is disconnected; it will register again."""
        if self._closed:
            return
        if self._queue.qsize() >= MOST_QUEUED:
            self.close(Rejected(code="slow", reason=f"{MOST_QUEUED} messages wait for this node"))
            return
        self._queue.put_nowait(message)

    def close(self, last: Rejected | None = None) -> None:
        """End the stream after what is queued, with a reason where there is one."""
        if self._closed:
            return
        self._closed = True
        if last is not None:
            self._queue.put_nowait(last)
        self._queue.put_nowait(None)

    async def next(self) -> HubToNode | None:
        return await self._queue.get()


class ControlService(Protocol):
    """What a hub does. Errors of ours become status codes; anything else is a defect."""

    async def authenticate(self, bearer: Bearer, peer: str) -> Principal: ...

    async def node_joined(self, who: Principal, register: Register, session: NodeSession) -> None: ...

    def node_said(self, session: NodeSession, message: NodeToHub) -> None: ...

    def node_left(self, session: NodeSession) -> None: ...

    async def query_mesh(self, who: Principal) -> Mesh: ...

    async def submit_job(self, who: Principal, spec: JobSpec) -> tuple[JobId, Epoch]: ...

    async def reconfigure_job(self, who: Principal, change: Reconfiguration) -> Epoch: ...

    async def take_over_job(self, who: Principal, taken: TakeOver) -> tuple[Epoch, ParallelConfig]: ...

    def watch_job(self, who: Principal, job_id: JobId) -> AsyncIterator[JobUpdate]: ...

    async def report_units(self, who: Principal, units: Sequence[Unit], different: Sequence[Unit] = ()) -> None: ...

    async def report_progress(
        self, who: Principal, job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress]
    ) -> None: ...

    async def end_job(
        self, who: Principal, job_id: JobId, state: JobState, reason: str, epoch: Epoch | None
    ) -> None: ...

    async def list_jobs(self, who: Principal, query: JobQuery) -> JobsPage: ...

    async def explain_job(self, who: Principal, job_id: JobId) -> JobReport: ...

    async def statement(self, who: Principal, query: StatementQuery) -> Statement: ...

    async def units(self, who: Principal, query: UnitsQuery) -> UnitsPage: ...


def read_bearer(metadata: Sequence[tuple[str, str | bytes]] | None) -> Bearer:
    """Raises: AuthenticationError: the call carries no `authorization`, or one of another form."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
            kind, *parts = value.removeprefix("Bearer ").split(".")
            if parts and len(value) <= 512:
                return Bearer(kind=kind, parts=tuple(parts))
    raise AuthenticationError("the call carries no token or credential")


class Servicer(ControlServicer):
    """Wire to values and back; no decision is taken here."""

    def __init__(self, service: ControlService) -> None:
        self._service = service

    async def _recognise(self, context: Any) -> Principal:
        try:
            bearer = read_bearer(context.invocation_metadata())
        except AuthenticationError:
            bearer = NOTHING_SHOWN  # the service refuses it, and knows then that it did
        return await self._service.authenticate(bearer, context.peer())

    async def Node(self, _: Any, context: Any) -> None:  # the name in the .proto
        session = NodeSession(context.peer())
        try:
            who = await self._recognise(context)
            register = await _read_register(context)
            await self._service.node_joined(who, register, session)
        except DistensorError as error:
            self._service.node_left(session)
            await _abort(context, error)
        try:
            await self._converse(session, context)
        finally:
            self._service.node_left(session)

    async def _converse(self, session: NodeSession, context: Any) -> None:
        listening = asyncio.ensure_future(self._listen(session, context))
        try:
            while (message := await session.next()) is not None:
                await context.write(write_hub_message(message))
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening  # an exception from there is a defect: it ends this stream and is logged

    async def _listen(self, session: NodeSession, context: Any) -> None:
        try:
            while (message := await context.read()) is not EOF:
                self._service.node_said(session, read_node_message(message))
        except HubProtocolError as error:
            session.close(Rejected(code="protocol", reason=str(error)))
        finally:
            session.close()

    async def QueryMesh(self, request: pb.QueryMeshRequest, context: Any) -> pb.MeshReply:
        async with _answering(context):
            return codec.write_mesh(await self._service.query_mesh(await self._recognise(context)))

    async def SubmitJob(self, request: pb.SubmitJobRequest, context: Any) -> pb.SubmitJobReply:
        async with _answering(context):
            who = await self._recognise(context)
            job_id, epoch = await self._service.submit_job(who, codec.read_spec(request))
            return pb.SubmitJobReply(job_id=job_id, epoch=epoch)

    async def ReconfigureJob(self, request: pb.ReconfigureJobRequest, context: Any) -> pb.ReconfigureJobReply:
        async with _answering(context):
            who = await self._recognise(context)
            epoch = await self._service.reconfigure_job(who, codec.read_reconfiguration(request))
            return pb.ReconfigureJobReply(epoch=epoch)

    async def TakeOverJob(self, request: pb.TakeOverJobRequest, context: Any) -> pb.TakeOverJobReply:
        async with _answering(context):
            who = await self._recognise(context)
            epoch, parallel = await self._service.take_over_job(who, codec.read_take_over(request))
            return pb.TakeOverJobReply(epoch=epoch, parallel=codec.write_parallel(parallel))

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.JobUpdateMessage]:
        async with _answering(context):
            who = await self._recognise(context)
            job_id = JobId(codec.read_name(request.job_id, "job_id"))
            async with contextlib.aclosing(self._service.watch_job(who, job_id)) as updates:  # type: ignore[type-var]
                async for update in updates:
                    yield codec.write_update(update)

    async def ReportUnits(self, request: pb.ReportUnitsRequest, context: Any) -> pb.ReportUnitsReply:
        async with _answering(context):
            who = await self._recognise(context)
            await self._service.report_units(who, _read_units(request.units), _read_units(request.different))
            return pb.ReportUnitsReply()

    async def ReportProgress(self, request: pb.ReportProgressRequest, context: Any) -> pb.ReportProgressReply:
        async with _answering(context):
            who = await self._recognise(context)
            await self._service.report_progress(who, *progress_codec.read_progress(request))
            return pb.ReportProgressReply()

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        async with _answering(context):
            who = await self._recognise(context)
            return job_codec.write_page(await self._service.list_jobs(who, job_codec.read_query(request)))

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobReply:
        async with _answering(context):
            who = await self._recognise(context)
            job_id = JobId(codec.read_name(request.job_id, "job_id"))
            return job_codec.write_report(await self._service.explain_job(who, job_id))

    async def EndJob(self, request: pb.EndJobRequest, context: Any) -> pb.EndJobReply:
        async with _answering(context):
            who = await self._recognise(context)
            state = codec.read_job_state(request.state)
            job_id = JobId(codec.read_name(request.job_id, "job_id"))
            epoch = Epoch(request.epoch) if request.epoch else None
            await self._service.end_job(who, job_id, state, codec.read_text(request.reason, "reason"), epoch)
            return pb.EndJobReply()

    async def Statement(self, request: pb.StatementRequest, context: Any) -> pb.StatementReply:
        async with _answering(context):
            who = await self._recognise(context)
            found = await self._service.statement(who, statement_codec.read_query(request))
            return statement_codec.write_statement(found)

    async def Units(self, request: pb.UnitsRequest, context: Any) -> pb.UnitsReply:
        async with _answering(context):
            who = await self._recognise(context)
            found = await self._service.units(who, statement_codec.read_units_query(request))
            return statement_codec.write_units(found)


def _read_units(units: Sequence[pb.Unit]) -> tuple[Unit, ...]:
    if len(units) > MAX_UNITS_PER_MESSAGE:
        raise HubProtocolError(f"{len(units)} units; at most {MAX_UNITS_PER_MESSAGE} are allowed")
    return tuple(codec.read_unit(unit) for unit in units)


async def _read_register(context: Any) -> Register:
    try:
        async with asyncio.timeout(REGISTER_SECONDS):
            message = await context.read()
    except TimeoutError as error:
        raise HubProtocolError(f"no Register within {REGISTER_SECONDS:g} s") from error
    if message is EOF:
        raise HubProtocolError("the stream ended before a Register")
    register = read_node_message(message)
    if not isinstance(register, Register):
        raise HubProtocolError(f"the first message is {type(register).__name__}, expected Register")
    return register


@contextlib.asynccontextmanager
async def _answering(context: Any) -> AsyncIterator[None]:
    """Turn our errors into the call's status."""
    try:
        yield
    except DistensorError as error:
        await _abort(context, error)


async def _abort(context: Any, error: DistensorError) -> NoReturn:
    await context.abort(status_of_error(error), str(error))
    raise AssertionError("abort raises")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerIdentity:
    """The TLS key and chain (leaf first, authority last) of a hub."""

    key_pem: bytes
    chain_pem: bytes


class ControlServer:
    """A running gRPC server."""

    def __init__(self, server: grpc.aio.Server, address: HubAddress) -> None:
        self._server = server
        self.address = address

    async def stop(self) -> None:
        await self._server.stop(STOP_SECONDS)


async def start_server(service: ControlService, identity: ServerIdentity, listen: HubAddress) -> ControlServer:
    """Listen and serve.

    Raises:
        ControlError: the address cannot be listened on (the port is taken, the host is not of this machine).
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_ControlServicer_to_server(Servicer(service), server)  # type: ignore[no-untyped-call]
    credentials = grpc.ssl_server_credentials([(identity.key_pem, identity.chain_pem)])
    try:
        port = server.add_secure_port(str(listen), credentials)
    except RuntimeError as error:
        raise ControlError(f"cannot listen on {listen}") from error
    await server.start()
    return ControlServer(server, HubAddress(host=listen.host, port=port))
