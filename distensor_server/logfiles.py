"""Log files that cannot grow without bound: a file is moved aside at its limit, and the oldest is dropped."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

MAX_BYTES = 10 * 1024 * 1024
KEEP = 5


class RotatingFile:
    """`name`, `name.1` ... `name.<keep - 1>`, each at most `max_bytes` long (one write more at the end).

    A full disk or a missing directory costs lines, never an exception: a log is no reason to stop working. `trouble`
    says what the last write met.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: FileIO | None = None
        self._size = 0
        self.trouble: str | None = None

    def write(self, data: bytes) -> None:
        try:
            file = self._open()
            if self._size + len(data) > self._max_bytes and self._size > 0:
                self._rotate()
                file = self._open()
            # Unbuffered: what a full disk did not take is gone, not kept in memory for later.
            self._size += file.write(data) or 0
        except OSError as error:
            self.trouble = error.strerror or str(error)
        else:
            self.trouble = None

    def _open(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self._path, "ab", opener=_private)
            self._size = self._file.tell()
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rotate(self) -> None:
        self.close()
        for number in range(self._keep - 1, 0, -1):
            source = self._path if number == 1 else self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class LastLine:
    """Remembers the last line of a stream that has text: for a Python traceback, the line with the exception."""

    __slots__ = ("_last", "_pending")

    def __init__(self) -> None:
        self._last = ""
        self._pending = b""

    def feed(self, chunk: bytes) -> None:
        *ended, rest = (self._pending + chunk).split(b"\n")
        self._pending = rest[-4096:]
        for line in reversed(ended):
            if line.strip():
                self._last = line[-4096:].decode("utf-8", "replace").strip()
                return

    @property
    def text(self) -> str:
        return self._pending.decode("utf-8", "replace").strip() or self._last
