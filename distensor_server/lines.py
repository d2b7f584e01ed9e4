"""Bytes in, lines out. A line over the limit is reported once and skipped, however long it goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Oversize:
    """A line that grew past the limit; its bytes are gone."""

    limit: int


class LineSplitter:
    """Cuts a byte stream at newlines and never holds more than `limit` bytes."""

    __slots__ = ("_limit", "_pending", "_skipping")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes | Oversize]:
        """The lines that `chunk` completes, without their newline."""
        *ended, rest = chunk.split(b"\n")
        out: list[bytes | Oversize] = []
        for piece in ended:
            self._append(piece, out)
            self._finish(out)
        self._append(rest, out)
        return out

    def _append(self, piece: bytes, out: list[bytes | Oversize]) -> None:
        if self._skipping:
            return
        self._pending += piece
        if len(self._pending) > self._limit:
            self._pending.clear()
            self._skipping = True
            out.append(Oversize(limit=self._limit))

    def _finish(self, out: list[bytes | Oversize]) -> None:
        if not self._skipping:
            out.append(bytes(self._pending))
        self._pending.clear()
        self._skipping = False
