"""Log files that cannot grow without bound: a file is moved aside at its limit, and the oldest is dropped."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

MAX_BYTES = 10 * 1024 * 1024
KEEP = 5


class RotatingFile:
    """`name`, `name.1` ... `name.<keep - 1>`, each at most `max_bytes` long (one write more at the end)."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: BinaryIO = path.open("ab")
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        if self._size + len(data) > self._max_bytes and self._size > 0:
            self._rotate()
        self._file.write(data)
        self._file.flush()
        self._size += len(data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._keep - 1, 0, -1):
            source = self._path if number == 1 else self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))
        self._file = self._path.open("ab")
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


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
