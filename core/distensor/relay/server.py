"""The relay at work. It sees who talks to whom and how much, and nothing of what they say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509

from distensor.comm.address import HubAddress
from distensor.comm.relay_words import LONGEST, NONCE_BYTES, VERSION, Role, Wish, read_wish, write_line
from distensor.core.clock import Clock
from distensor.core.errors import AuthenticationError, ControlError, HubProtocolError
from distensor.relay.desk import Caps, Desk

PROOF_SECONDS = 10.0
"""How long a stranger may take to prove who it is."""
DIAL_SECONDS = 20.0
"""How long a member waits for the one that it dials to be there."""
PIECE = 1 << 16


@dataclass(eq=False, slots=True)
class _Line:
    """One connection of a proven member."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    joined: asyncio.Future[_Line] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The dialer, for one that is parked."""
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody reads from it any more: the dialer's task may."""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, **words: object) -> None:
        if not self.writer.is_closing():
            self.writer.write(write_line(dict(words)))

    async def close(self) -> None:
        self.over.set()
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Relay:
    """Serves connections until `close`; see `serve`."""

    def __init__(self, authority_pem: str, caps: Caps, clock: Clock, log: Callable[[str], None]) -> None:
        self._authority = x509.load_pem_x509_certificate(authority_pem.encode())
        self._clock, self._log = clock, log
        self._desk: Desk[_Line] = Desk(caps)
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._free_at = 0.0

    @property
    def forwarded(self) -> int:
        """Bytes, both ways together."""
        return self._desk.total

    @property
    def connections(self) -> int:
        return len(self._tasks)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by the server with each connection."""
        line = _Line(reader, writer)
        if len(self._tasks) >= self._desk.caps.connections:
            line.say(error=f"this relay has its {self._desk.caps.connections} connections")
            writer.close()
            return
        task = asyncio.create_task(self._serve(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, line: _Line) -> None:
        try:
            wish = await self._prove(line)
            refusal = self._desk.admit(wish.member.job_id)
            if refusal is not None:
                line.say(error=refusal)
                return
            try:
                await (self._park if wish.role is Role.PARK else self._dial)(line, wish)
            finally:
                self._desk.dismiss(wish.member.job_id)
        except (AuthenticationError, HubProtocolError) as error:
            line.say(error=str(error))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return  # it went away, said nothing in time, or said too much
        finally:
            await line.close()

    async def _prove(self, line: _Line) -> Wish:
        nonce = secrets.token_bytes(NONCE_BYTES)
        line.say(v=VERSION, nonce=nonce.hex())
        async with asyncio.timeout(PROOF_SECONDS):
            said = await line.reader.readline()
        return read_wish(said, nonce, self._authority, self._clock.now())

    async def _park(self, line: _Line, wish: Wish) -> None:
        """Wait until somebody dials, then until that conversation, which the dialer's task leads, is over."""
        place = wish.meeting
        line.say(parked=True)
        oldest = self._desk.park(place, line)
        if oldest is not None:
            oldest.joined.cancel()
        async with self._arrived:
            self._arrived.notify_all()
        gone = asyncio.create_task(line.reader.read(1))
        try:
            either: list[asyncio.Future[Any]] = [line.joined, gone]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._desk.unpark(place, line)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            line.free.set()
        if line.joined.done() and not line.joined.cancelled():
            await line.over.wait()

    async def _dial(self, line: _Line, wish: Wish) -> None:
        other: _Line | None = None
        try:
            async with asyncio.timeout(DIAL_SECONDS), self._arrived:
                while (other := self._desk.take(wish.meeting)) is None:
                    await self._arrived.wait()
        except TimeoutError:
            line.say(error=f"rank {wish.to} of job {wish.member.job_id} is not at this relay")
            return
        await self._forward(line, other, wish)

    async def _forward(self, line: _Line, other: _Line, wish: Wish) -> None:
        other.joined.set_result(line)
        await other.free.wait()
        for each in (other, line):
            each.say(joined=True)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(line, other, wish))
                both.create_task(self._pump(other, line, wish))
        except* (OSError, HubProtocolError) as group:
            for error in group.exceptions:
                if isinstance(error, HubProtocolError):
                    self._log(str(error))
        finally:
            other.over.set()
            other.writer.close()

    async def _pump(self, source: _Line, sink: _Line, wish: Wish) -> None:
        job_id = wish.member.job_id
        while data := await source.reader.read(PIECE):
            if self._desk.left(job_id) < len(data):
                raise HubProtocolError(f"job {job_id} has used its {self._desk.caps.job_bytes} bytes at this relay")
            self._desk.forwarded(job_id, len(data))
            await self._pace(len(data))
            sink.writer.write(data)
            await sink.writer.drain()
        if sink.writer.can_write_eof():
            sink.writer.write_eof()

    async def _pace(self, count: int) -> None:
        rate = self._desk.caps.rate
        if rate is None:
            return
        now = self._clock.monotonic()
        self._free_at = max(self._free_at, now) + count / rate
        await self._clock.sleep_async(max(0.0, self._free_at - now - PIECE / rate))


@contextlib.asynccontextmanager
async def serve(relay: Relay, listen: HubAddress) -> AsyncIterator[HubAddress]:
    """Listen during the block; gives the bound address.

    Raises:
        ControlError: the address cannot be listened on.
    """
    try:
        server = await asyncio.start_server(relay.accept, listen.host, listen.port, limit=max(LONGEST, 2 * PIECE))
    except OSError as error:
        why = error.strerror or str(error)
        raise ControlError(f"cannot listen on {listen}: {why}; choose an address of this machine") from error
    try:
        yield HubAddress(host=listen.host, port=int(server.sockets[0].getsockname()[1]))
    finally:
        server.close()
        await relay.close()
        await server.wait_closed()
