"""One blocking conversation with the supervisor, for the commands that print and end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from distensor_tui import absence
from distensor_tui.absence import Absence
from distensor_tui.clock import system_monotonic
from distensor_tui.model import Snapshot
from distensor_tui.paths import path_too_long
from distensor_tui.sections import apply
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

WITHIN_S = 5.0


class NoSupervisor(Exception):  # noqa: N818 - reads as the answer that it is
    """There is nobody to talk to, and why."""

    def __init__(self, why: Absence) -> None:
        super().__init__(why.title)
        self.why = why


class Conversation:
    """An open connection whose hello has been read."""

    def __init__(self, connection: socket.socket, path: Path, monotonic: Callable[[], float]) -> None:
        self._socket, self._path, self._monotonic = connection, path, monotonic
        self._buffer = b""
        self.lines: list[bytes] = []
        """Every line read so far, for recordings."""
        self.updates: list[Update] = []
        """What came while an answer was waited for."""
        self.hello = self._greet()

    def snapshot(self) -> tuple[Snapshot, Mapping[str, object]]:
        """The first snapshot, typed and raw."""
        deadline = self._monotonic() + WITHIN_S
        while True:
            message = self.read(deadline)
            if isinstance(message, Update) and message.full:
                return apply(Snapshot(), message.data, full=True), message.data

    def ask(self, method: str, params: Mapping[str, object]) -> Answer:
        deadline = self._monotonic() + WITHIN_S
        with suppress(OSError):  # gone: reading gives what came before the end, and then says so
            self._socket.sendall(encode_request("cli", method, params))
        while True:
            message = self.read(deadline)
            if isinstance(message, Answer) and message.id == "cli":
                return message
            if isinstance(message, Update):
                self.updates.append(message)

    def wait(self, deadline: float) -> Message | None:
        """The next message; None when none came in time."""
        try:
            return self.read(deadline)
        except NoSupervisor as missing:
            if missing.why.reason is not absence.Reason.SILENT:
                raise
            return None

    def read(self, deadline: float) -> Message:
        line = self._line(deadline)
        try:
            return decode(line)
        except WireError as error:
            raise NoSupervisor(absence.not_a_supervisor(self._path, str(error))) from error

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            self._buffer += self._receive(deadline)
            if len(self._buffer) > LONGEST_LINE:
                raise NoSupervisor(absence.not_a_supervisor(self._path, "a line without an end"))
        line, self._buffer = self._buffer.split(b"\n", 1)
        self.lines.append(line)
        return line

    def _receive(self, deadline: float) -> bytes:
        left = deadline - self._monotonic()
        try:
            self._socket.settimeout(max(left, 0.001))
            chunk = self._socket.recv(1 << 16)
        except TimeoutError as error:
            raise NoSupervisor(absence.silent(self._path, WITHIN_S)) from error
        except OSError as error:
            raise NoSupervisor(absence.not_running(self._path, left_over=True)) from error
        if not chunk:
            raise NoSupervisor(self._closed())
        return chunk

    def _closed(self) -> Absence:
        if self._buffer and not self.lines:
            return absence.not_a_supervisor(self._path, repr(self._buffer[:40]))
        return absence.not_running(self._path, left_over=True)

    def _greet(self) -> Hello:
        message = self.read(self._monotonic() + WITHIN_S)
        if not isinstance(message, Hello):
            raise NoSupervisor(absence.not_a_supervisor(self._path, "no hello came first"))
        if message.schema_version != SCHEMA_VERSION:
            raise NoSupervisor(absence.other_version(message))
        return message


@contextmanager
def converse(path: Path, monotonic: Callable[[], float] = system_monotonic) -> Iterator[Conversation]:
    """Connect and read the hello. Raises NoSupervisor with the reason and the fix."""
    if path_too_long(path):
        raise NoSupervisor(absence.path_too_long(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WITHIN_S)
        try:
            connection.connect(str(path))
        except TimeoutError as error:
            raise NoSupervisor(absence.silent(path, WITHIN_S)) from error
        except OSError as error:
            raise NoSupervisor(absence.from_os_error(error, path)) from error
        yield Conversation(connection, path, monotonic)
