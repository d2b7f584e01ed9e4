"""A relay in a thread of the test, and members of a job as it sees them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from distensor.comm.address import HubAddress
from distensor.comm.relay_words import Role, read_line, read_nonce, write_wish
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.relay.desk import Caps
from distensor.relay.server import Relay, serve
from distensor.transport import Address, Credentials

T = TypeVar("T")


class RunningRelay:
    """`relay` and where it listens."""

    def __init__(self, relay: Relay, address: Address, lines: list[str], loop: asyncio.AbstractEventLoop) -> None:
        self.relay, self.address, self.lines, self._loop = relay, address, lines, loop

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """In the relay's loop."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)


@contextmanager
def relay_of(authority_pem: str, caps: Caps | None = None, clock: Clock = SYSTEM_CLOCK) -> Iterator[RunningRelay]:
    ready = threading.Event()
    made: list[RunningRelay] = []
    stop: list[asyncio.Event] = []

    async def run() -> None:
        lines: list[str] = []
        relay = Relay(authority_pem, caps or Caps(), clock, lines.append)
        async with serve(relay, HubAddress(host="127.0.0.1", port=0)) as bound:
            stop.append(asyncio.Event())
            address = Address(host=bound.host, port=bound.port)
            made.append(RunningRelay(relay, address, lines, asyncio.get_running_loop()))
            ready.set()
            await stop[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(10)
    loop = made[0]._loop
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop[0].set)
        thread.join(10)


class Member:
    """One raw connection to a relay, not yet proven."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection((address.host, address.port), 10)
        self._file = self.socket.makefile("rb", buffering=0)

    def line(self) -> dict[str, Any]:
        """The relay's next line; empty when it has closed the connection."""
        raw = self._file.readline()
        return read_line(raw) if raw else {}

    def wish(self, role: Role, to: int, credentials: Credentials) -> Member:
        nonce = read_nonce(self.line())
        self.socket.sendall(write_wish(role, to, nonce, credentials.certificate_pem, credentials.key_pem))
        return self

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
