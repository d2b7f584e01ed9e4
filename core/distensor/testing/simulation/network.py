"""The network between the hub and those who speak to it: gRPC's place, with its real servicer and messages.

A stream keeps its order and loses nothing until it breaks, as TCP does. Paths are slow, cut and healed; a cut holds
back what is on its way, and keep-alives end a connection that a cut or a silent death has made useless. A call may be
lost, its answer may be lost, and it may arrive once more, late: callers repeat what was not answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from distensor.comm.address import HubAddress
from distensor.comm.channels import EOF
from distensor.comm.failures import error_of_status
from distensor.comm.link_stream import CONNECT_SECONDS
from distensor.comm.reach import Metadata
from distensor.comm.server import Servicer
from distensor.core.errors import HubUnreachableError
from distensor.testing.simulation.trace import Trace

HUB = "hub"
ADDRESS = HubAddress(host="hub.example", port=50051)
CLIENT_KEEPALIVE_SECONDS = 15.0
SERVER_KEEPALIVE_SECONDS = 30.0
LATEST_REPEAT_SECONDS = 5.0


class Host(Protocol):
    """A hub that is up."""

    servicer: Servicer

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that ends with the hub."""


@dataclass(kw_only=True, slots=True)
class Odds:
    """Of one call or message: that the request is lost, that the answer is, that it arrives once more."""

    lost: float = 0.0
    unanswered: float = 0.0
    repeated: float = 0.0


@dataclass(slots=True)
class Path:
    """Between two parties. Delays are drawn from `low` to `high` seconds."""

    low: float = 0.002
    high: float = 0.05
    up: bool = True
    cuts: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def delay(self, dice: random.Random) -> float:
        return dice.uniform(self.low, self.high)

    def cut(self) -> None:
        self.up = False
        self.cuts += 1

    def heal(self) -> None:
        self.up = True
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()

    async def opened(self) -> None:
        """Return when the path is up."""
        while not self.up:
            again = asyncio.Event()
            self.waiting.append(again.set)
            await again.wait()


class _AbortedError(Exception):
    """The servicer ends a call with a status, as gRPC's own does by an exception."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


@dataclass(frozen=True, slots=True)
class _End:
    """The last thing in a pipe. `code` None: the other side closed."""

    code: grpc.StatusCode | None
    details: str = ""


class _Pipe:
    """One direction of a connection: in order, each item after the path's delay."""

    def __init__(self, network: Network, path: Path, deliver: Callable[[Any], None]) -> None:
        self._network = network
        self._path = path
        self._deliver = deliver
        self._items: deque[tuple[float, Any]] = deque()
        self._last = 0.0
        self._armed = False

    def put(self, item: Any) -> None:
        self._last = max(self._last, self._network.time() + self._path.delay(self._network.dice))
        self._items.append((self._last, item))
        self._arm()

    def clear(self) -> None:
        self._items.clear()

    def _arm(self) -> None:
        if self._items and not self._armed:
            self._armed = True
            self._network.loop.call_at(max(self._items[0][0], self._network.time()), self._pump)

    def _pump(self) -> None:
        self._armed = False
        if not self._items:
            return
        if not self._path.up:
            self._path.waiting.append(self._arm)
        elif self._items[0][0] > self._network.time() + 1e-9:
            self._arm()
        else:
            self._deliver(self._items.popleft()[1])
            self._arm()


class Context:
    """What a servicer sees of gRPC."""

    def __init__(self, party: str, metadata: Metadata) -> None:
        self._party = party
        self._metadata = metadata
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.write_to: Callable[[Any], None] = lambda _: None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def read(self) -> Any:
        return await self.received.get()

    async def write(self, message: Any) -> None:
        self.write_to(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise _AbortedError(code, details)


class Connection:
    """One stream. What the client does with it is what `LinkStream` does with a call of gRPC."""

    def __init__(
        self, network: Network, party: str, metadata: Metadata, serve: Callable[[Servicer, Context], Awaitable[None]]
    ) -> None:
        self._network = network
        self.party = party
        self.path = network.path(party)
        self._serve = serve
        self._context = Context(party, metadata)
        self._to_server = _Pipe(network, self.path, self._at_server)
        self._to_client = _Pipe(network, self.path, self._at_client)
        self._context.write_to = self._to_client.put
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._ended: _End | None = None
        self._client_gone = False
        self._task: asyncio.Task[Any] | None = None
        self._messages = 0

    def begin(self, host: Host) -> None:
        self._task = host.spawn(self._run(host))

    async def _run(self, host: Host) -> None:
        try:
            await self._serve(host.servicer, self._context)
            self._to_client.put(_End(grpc.StatusCode.OK))
        except _AbortedError as error:
            self._to_client.put(_End(error.code, error.details))

    @property
    def served(self) -> bool:
        """Whether a hub has this stream open."""
        return self._task is not None and not self._task.done()

    @property
    def alive(self) -> bool:
        return self.served or (self._ended is None and not self._client_gone)

    # What is on its way

    def _at_server(self, item: Any) -> None:
        if not self.served:
            if self._network.host is not None:
                self._to_client.put(_End(grpc.StatusCode.UNAVAILABLE, "connection reset"))
        elif isinstance(item, _End):
            self._network.trace.note(HUB, f"the stream of {self.party} ends")
            self._cancel()
        else:
            self._messages += 1
            for _ in range(2 if self._messages > 1 and self._network.chance(self._network.odds.repeated) else 1):
                self._network.trace.note(HUB, f"<- {self.party} {item.ByteSize()}")
                self._network.heard(self, item)
                self._context.received.put_nowait(item)

    def _at_client(self, item: Any) -> None:
        if self._client_gone or self._ended is not None:
            return
        if isinstance(item, _End):
            self._ended = item
        else:
            self._network.trace.note(self.party, f"<- hub {item.ByteSize()}")
        self._received.put_nowait(item)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # How it breaks

    def reset(self) -> None:
        """Both ends learn now that it is broken; what was on its way is lost."""
        self._to_server.clear()
        self._to_client.clear()
        self._cancel()
        self._at_client(_End(grpc.StatusCode.UNAVAILABLE, "connection reset"))

    def lose_server(self, *, quiet: bool) -> None:
        """The hub's process is gone. `quiet`: with its machine, so that nobody says so."""
        self._cancel()
        self._to_server.clear()
        if quiet:
            self.doubt()
        else:
            self._to_client.put(_End(grpc.StatusCode.UNAVAILABLE, "connection reset"))

    def lose_client(self, *, quiet: bool) -> None:
        self._client_gone = True
        self._to_server.clear()
        if quiet:
            self.doubt()
        else:
            self._to_server.put(_End(None))

    def doubt(self) -> None:
        """A cut or a silent death: keep-alives find out whether this is still a connection."""
        cuts = self.path.cuts
        self._network.loop.call_later(CLIENT_KEEPALIVE_SECONDS, self._client_asks, cuts)
        self._network.loop.call_later(SERVER_KEEPALIVE_SECONDS, self._server_asks, cuts)

    def _cut_since(self, cuts: int) -> bool:
        return not self.path.up and self.path.cuts == cuts

    def _client_asks(self, cuts: int) -> None:
        if self._cut_since(cuts) or not self.served:
            self._at_client(_End(grpc.StatusCode.UNAVAILABLE, "keep-alive unanswered"))

    def _server_asks(self, cuts: int) -> None:
        if self._cut_since(cuts) or self._client_gone or self._ended is not None:
            self._cancel()

    # As a call of gRPC

    async def write(self, message: Any) -> None:
        if self._ended is not None:
            raise _rpc_error(self._ended)
        if not self._client_gone:
            self._to_server.put(message)

    async def read(self) -> Any:
        if self._ended is not None and self._received.empty():
            item: Any = self._ended
        else:
            item = await self._received.get()
        if not isinstance(item, _End):
            return item
        if item.code is grpc.StatusCode.OK:
            return EOF
        raise _rpc_error(item)

    async def code(self) -> grpc.StatusCode:
        assert self._ended is not None
        return self._ended.code or grpc.StatusCode.UNKNOWN

    async def details(self) -> str:
        assert self._ended is not None
        return self._ended.details

    def cancel(self) -> None:
        if not self._client_gone and self._ended is None:
            self._client_gone = True
            self._to_server.put(_End(None))


def _rpc_error(end: _End) -> grpc.aio.AioRpcError:
    code = end.code or grpc.StatusCode.UNKNOWN
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), end.details, end.details)


class Network:
    """All paths, and who is connected. `heard` is told each message that a hub receives on a stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dice: random.Random, trace: Trace) -> None:
        self.loop = loop
        self.dice = dice
        self.trace = trace
        self.odds = Odds()
        self.host: Host | None = None
        self.machine_up = True
        self.heard: Callable[[Connection, Any], None] = lambda *_: None
        self._paths: dict[tuple[str, str], Path] = {}
        self._connections: list[Connection] = []

    def time(self) -> float:
        return self.loop.time()

    def chance(self, odds: float) -> bool:
        return odds > 0 and self.dice.random() < odds

    def path(self, party: str, other: str = HUB) -> Path:
        one, two = sorted((party, other))
        return self._paths.setdefault((one, two), Path())

    @property
    def paths(self) -> list[Path]:
        return list(self._paths.values())

    def connections(self, party: str | None = None) -> list[Connection]:
        """Those that at least one end takes for open."""
        self._connections = [one for one in self._connections if one.alive]
        return [one for one in self._connections if party in (None, one.party)]

    def cut(self, party: str, other: str = HUB) -> None:
        self.path(party, other).cut()
        if other == HUB:
            for connection in self.connections(party):
                connection.doubt()

    async def connect(
        self, party: str, metadata: Metadata, serve: Callable[[Servicer, Context], Awaitable[None]]
    ) -> Connection:
        """Open a stream. Raises: HubUnreachableError: refused, or nobody answers in time."""
        connection = Connection(self, party, metadata, serve)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                host = await self._arrive(connection.path)
        except TimeoutError as error:
            raise HubUnreachableError(f"no hub answers at {ADDRESS} within {CONNECT_SECONDS:g} s") from error
        self._connections.append(connection)
        connection.begin(host)
        return connection

    async def _arrive(self, path: Path) -> Host:
        """There and back once, as TLS needs it at least."""
        for _ in range(2):
            await path.opened()
            await asyncio.sleep(path.delay(self.dice))
        if not self.machine_up:
            await asyncio.sleep(CONNECT_SECONDS)
        if self.host is None:
            raise HubUnreachableError(f"no hub at {ADDRESS}: connection refused")
        return self.host

    async def call(self, party: str, method: str, request: Any, metadata: Metadata, seconds: float) -> Any:
        """One call and its answer.

        Raises:
            HubUnreachableError: no answer came; the hub may have heard it all the same.
            ControlError: what the hub refused.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._call(party, method, request, metadata)
        except TimeoutError as error:
            raise HubUnreachableError(f"no answer to {method} within {seconds:g} s") from error

    async def _call(self, party: str, method: str, request: Any, metadata: Metadata) -> Any:
        path = self.path(party)
        host = await self._arrive(path)
        if self.chance(self.odds.lost):
            raise HubUnreachableError(f"{method} was lost")
        if self.chance(self.odds.repeated):
            late = self.dice.uniform(0.0, LATEST_REPEAT_SECONDS)
            self.loop.call_later(late, self._again, party, method, request, metadata)
        answering = host.spawn(self._serve(party, method, request, metadata, host))
        try:
            await asyncio.wait([answering])
        except asyncio.CancelledError:  # the caller has given up; most hubs hear of it
            if self.chance(0.5):
                answering.cancel()
            raise
        if answering.cancelled():
            raise HubUnreachableError("the hub went away")
        code, answer = answering.result()
        await path.opened()
        await asyncio.sleep(path.delay(self.dice))
        if self.chance(self.odds.unanswered):
            raise HubUnreachableError(f"the answer to {method} was lost")
        if code is not None:
            raise error_of_status(code, answer, ADDRESS)
        return answer

    def _again(self, party: str, method: str, request: Any, metadata: Metadata) -> None:
        if self.host is not None:
            self.host.spawn(self._serve(party, method, request, metadata, self.host))

    async def _serve(self, party: str, method: str, request: Any, metadata: Metadata, host: Host) -> tuple[Any, Any]:
        self.trace.note(HUB, f"{method} of {party} {request.ByteSize()}")
        try:
            return None, await getattr(host.servicer, method)(request, Context(party, metadata))
        except _AbortedError as error:
            return error.code, error.details
