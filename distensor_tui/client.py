"""The dashboard's connection to the supervisor: connect, follow, ask, and try again when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from distensor_tui import absence
from distensor_tui.absence import Absence
from distensor_tui.paths import path_too_long
from distensor_tui.wire import (
    LONGEST_LINE,
    SCHEMA_VERSION,
    Answer,
    Hello,
    Message,
    Update,
    WireError,
    decode,
    encode_request,
)

FIRST_RETRY_S, LAST_RETRY_S = 0.25, 5.0
HELLO_WITHIN_S = 3.0
PING_EVERY_S = 10.0
ANSWER_WITHIN_S = 5.0
GONE = Answer(
    id="",
    ok=False,
    code="unavailable",
    message="The supervisor is not connected",
    fix="start it: distensor-server run",
)


class Sink(Protocol):
    """Who wants to know. All calls come from the event loop."""

    def on_hello(self, hello: Hello) -> None: ...
    def on_update(self, update: Update) -> None: ...
    def on_lost(self, why: Absence, retry_in: float) -> None: ...


class Lost(Exception):  # noqa: N818 - a state that has been reached, carried to where it is handled
    """The connection cannot be used, and why."""

    def __init__(self, why: Absence) -> None:
        super().__init__(why.title)
        self.why = why


class Client:
    """Follows one socket path for as long as `run` runs."""

    def __init__(self, path: Path, sink: Sink, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._path, self._sink, self._sleep = path, sink, sleep
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._asked = 0
        self._greeted = False

    async def run(self) -> None:
        """Connect again and again until cancelled."""
        delay = FIRST_RETRY_S
        while True:
            self._greeted = False
            try:
                await self._follow()
            except Lost as lost:
                delay = FIRST_RETRY_S if self._greeted else min(2 * delay, LAST_RETRY_S)
                self._sink.on_lost(lost.why, delay)
            await self._sleep(delay)

    async def ask(
        self, method: str, params: Mapping[str, object] | None = None, within: float = ANSWER_WITHIN_S
    ) -> Answer:
        """Send a request; an answer always comes, an unsuccessful one when the supervisor is gone."""
        if self._writer is None:
            return GONE
        self._asked += 1
        request_id = str(self._asked)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        try:
            self._writer.write(encode_request(request_id, method, params or {}))
            async with asyncio.timeout(within):
                return await answer
        except (TimeoutError, OSError):
            return GONE
        finally:
            self._waiting.pop(request_id, None)

    async def _follow(self) -> None:
        """One connection, from connect to its end, which is always a Lost."""
        reader, writer = await self._connect()
        try:
            await self._greet(reader)
            self._writer = writer
            await self._listen(reader)
        finally:
            self._writer = None
            self._drop_waiting()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if path_too_long(self._path):
            raise Lost(absence.path_too_long(self._path))
        try:
            return await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
        except OSError as error:
            raise Lost(absence.from_os_error(error, self._path)) from error

    async def _greet(self, reader: asyncio.StreamReader) -> None:
        message = await self._read(reader, HELLO_WITHIN_S)
        if not isinstance(message, Hello):
            raise Lost(absence.not_a_supervisor(self._path, f"a {type(message).__name__.lower()} before any hello"))
        if message.schema_version != SCHEMA_VERSION:
            raise Lost(absence.other_version(message))
        self._greeted = True
        self._sink.on_hello(message)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Dispatch messages; after a silence, ask whether somebody is there."""
        pinged = False
        while True:
            try:
                message = await self._read(reader, ANSWER_WITHIN_S if pinged else PING_EVERY_S)
                pinged = False
            except Lost as lost:
                if pinged or lost.why.reason is not absence.Reason.SILENT or self._writer is None:
                    raise
                self._writer.write(encode_request("ping", "ping", {}))
                pinged = True
                continue
            self._dispatch(message)

    async def _read(self, reader: asyncio.StreamReader, within: float) -> Message:
        try:
            async with asyncio.timeout(within):  # wait_for of Python 3.11 can swallow a cancellation
                line = await reader.readline()
            if not line.endswith(b"\n"):
                raise Lost(self._ended(line))
            return decode(line)
        except TimeoutError as error:
            raise Lost(absence.silent(self._path, within)) from error
        except (WireError, ValueError) as error:
            what = str(error) if isinstance(error, WireError) else f"a line over {LONGEST_LINE >> 20} MiB"
            raise Lost(absence.not_a_supervisor(self._path, what)) from error
        except OSError as error:
            raise Lost(absence.not_running(self._path, left_over=True)) from error

    def _ended(self, rest: bytes) -> Absence:
        """The other side closed: a supervisor that ended, or something that never was one."""
        if rest and not self._greeted:
            return absence.not_a_supervisor(self._path, f"{rest[:40]!r}")
        return absence.not_running(self._path, left_over=True)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Update):
            self._sink.on_update(message)
        elif isinstance(message, Answer):
            waiting = self._waiting.get(message.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    def _drop_waiting(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(GONE)
