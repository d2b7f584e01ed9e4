"""Bytes in and out of one connection that carries data one way, with exact counts.

A peer is reached over two connections, one per direction. OpenSSL's connection object may not be read and written by
two threads at once; with one direction each, the reader and the sender never share one, and both run at full speed.
"""

from __future__ import annotations

import mmap
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from distensor.core.clock import Clock
from distensor.core.errors import FrameError
from distensor.transport.frames import PREFIX_SIZE, FrameKind, Prefix, decode_prefix, encode_prefix
from distensor.transport.local_lanes import Connection, LocalSocket
from distensor.transport.rates import RateLimit
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Buffer, Channel, FrameLimits, NothingYetError, Tag

_RECORD = 1 << 14
"""The most that one TLS record holds, so the most that one read returns."""
_TELLING = 1 << 18
"""Bodies from this size tell how fast the line is: smaller ones came while nobody looked."""
_JOIN_BELOW = 1 << 15
"""Parts of a frame smaller than this in all are joined: one record instead of several."""
_MAP_ABOVE = 1 << 23
"""Larger bodies live in lazily committed pages: a peer that lies about a size costs address space, not memory."""
_KEEP_FROM, _KEEP_AT_MOST = 1 << 15, 1 << 22
"""Rooms of bodies that are kept for the next ones: from this size each, and up to so many bytes in all."""
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
"""Where the system has them, filling 64 MB costs 32 page faults instead of 16,384: 11 ms instead of 50."""
NO_TAG = Tag(Channel.META)


class WireClosedError(OSError):
    """The connection ended between frames or inside one."""


class WireWriter:
    """Frames onto a connection. One thread at a time."""

    __slots__ = ("_epoch", "_gather", "_limit", "_tls", "bytes_sent", "messages_sent")

    def __init__(self, tls: Connection, epoch: int, limit: RateLimit | None = None) -> None:
        self._tls = tls
        self._gather = tls.gather if isinstance(tls, TlsSocket | LocalSocket) else None
        self._limit = limit
        self._epoch = epoch
        self.bytes_sent = 0
        self.messages_sent = 0

    def signal(self, kind: FrameKind, text: bytes = b"", tag: Tag = NO_TAG) -> None:
        """A frame that is about the connection itself: it is booked under the cap, and does not wait for it."""
        data = encode_prefix(kind, self._epoch, tag, len(text), 0) + text
        if self._limit is not None:
            self._limit.book(len(data))
        self._write(data, None)

    def data(self, prefix_and_header: bytes, buffers: Sequence[memoryview]) -> None:
        size = len(prefix_and_header) + sum(len(buffer) for buffer in buffers)
        if size < _JOIN_BELOW:
            self._write(b"".join((prefix_and_header, *buffers)), self._limit)
        elif self._gather is not None and not (self._limit is not None and self._limit.active):
            self._write_all(self._gather, [memoryview(prefix_and_header), *buffers])
        else:
            self._write(prefix_and_header, self._limit)
            for buffer in buffers:
                self._write(buffer, self._limit)
        self.messages_sent += 1

    def data_now(self, tls: TlsSocket, prefix_and_header: bytes, buffers: Sequence[memoryview]) -> bool:
        """`data`, as far as `tls` takes it without waiting; whether that was all of it. If not, `flush` sends the rest.

        Counted as sent at once: of what is left the caller knows by the answer.
        """
        size = len(prefix_and_header) + sum(len(buffer) for buffer in buffers)
        whole: Sequence[Buffer] = (prefix_and_header, *buffers)
        done = tls.offer((b"".join(whole),) if size < _JOIN_BELOW else whole)
        self.bytes_sent += size
        self.messages_sent += 1
        return done

    def _write_all(self, gather: Callable[[Sequence[Buffer]], int], parts: list[memoryview]) -> None:
        """One call for all parts, as long as there is room: the reader is woken once."""
        while parts:
            count = gather(parts)
            self.bytes_sent += count
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if count:
                parts[0] = parts[0][count:]

    def _write(self, data: Buffer, limit: RateLimit | None) -> None:
        view = memoryview(data)
        while view:
            if limit is not None and limit.active:
                piece = view[: limit.piece(len(view))]
                limit.spend(len(piece))
                count = self._tls.write(piece)
            else:
                count = self._tls.write(view)
            self.bytes_sent += count
            view = view[count:]


class Rooms:
    """Memory for bodies, which is used again once nobody refers to the body that was in it.

    New memory costs a page fault for each 4 KB and is cleared first: together half of what decrypting into it costs.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """Room for `size` bytes, with anything in it."""
        for index in range(len(self._kept)):
            if len(self._kept[index]) == size and _references(self._kept, index) == _NOBODY_ELSE:
                return self._kept.pop(index)
        return bytearray(size)

    def keep(self, room: bytearray) -> None:
        """Remember what `take` gave: with the next call for that size it comes again, if it is free by then."""
        if len(room) < _KEEP_FROM:
            return
        self._kept.append(room)
        while sum(map(len, self._kept)) > _KEEP_AT_MOST:
            del self._kept[0]


def _references(rooms: list[bytearray], index: int) -> int:
    return sys.getrefcount(rooms[index])


_NOBODY_ELSE = _references([bytearray(1)], 0)
"""What `_references` says of a room that is in the list and nowhere else: the interpreter is asked."""


class WireReader:
    """Frames off a connection. One thread at a time."""

    __slots__ = (
        "_ahead",
        "_clock",
        "_epoch",
        "_filled",
        "_filling",
        "_header",
        "_limit",
        "_limits",
        "_prefix",
        "_room",
        "_rooms",
        "_started",
        "_tls",
        "bytes_received",
        "look",
        "messages_received",
        "rate",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        tls: Connection,
        epoch: int,
        limits: FrameLimits,
        read_ahead: int = _RECORD,
        limit: RateLimit | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`read_ahead=PREFIX_SIZE` reads a frame without header and body, and not a byte of what follows.

        With a clock, `rate` is measured.
        """
        self._tls = tls
        self._epoch = epoch
        self._limit = limit
        self._limits = limits
        self._room = memoryview(bytearray(read_ahead))
        self._ahead = self._room[:0]
        self._rooms = Rooms()
        self._prefix: Prefix | None = None
        self._header: bytes | None = None
        self._filling: Buffer | None = None
        self._filled, self._started = 0, 0.0
        self.look: Callable[[], bool] | None = None
        """Asked before each read that might block: whether there is something. Without it, reads block."""
        self.bytes_received = 0
        self.messages_received = 0
        self.waiting = False
        """Nothing is read because the cap is used up."""
        self._clock = clock
        self.rate: float | None = None
        """Bytes a second in which the newest large body came; None before the first."""

    @property
    def buffered(self) -> bool:
        """Whether bytes have come of which the kernel knows nothing any more."""
        if self._ahead:
            return True
        return not isinstance(self._tls, LocalSocket) and self._tls.pending() > 0

    def frame(self, limits: FrameLimits | None = None) -> tuple[Prefix, bytes, Buffer]:
        """The next frame, whole.

        Raises:
            NothingYetError: `look` found nothing in the middle of it. The next call goes on from there.
            WireClosedError: the connection ended.
            FrameError: bytes that are not a frame.
            OSError: the connection broke.
        """
        prefix = self._prefix
        if prefix is None:
            prefix = decode_prefix(self._small(PREFIX_SIZE), epoch=self._epoch, limits=limits or self._limits)
            self._prefix = prefix
        if self._header is None:
            self._header = self._small(prefix.header_size) if prefix.header_size else b""
        body = self._timed_body(prefix.body_size) if prefix.body_size else b""
        header, self._prefix, self._header = self._header, None, None
        if prefix.kind is FrameKind.DATA:
            self.messages_received += 1
        return prefix, header, body

    def _small(self, size: int) -> bytes:
        """The usual case costs one copy: a small frame came whole with one read."""
        ahead = self._ahead
        if self._filling is not None or len(ahead) < size:
            return bytes(self._body(size))
        self._ahead = ahead[size:]
        return bytes(ahead[:size])

    def _timed_body(self, size: int) -> Buffer:
        if self._clock is None or size < _TELLING:
            return self._body(size)
        if self._filling is None:
            self._started = self._clock.monotonic()
        body = self._body(size)
        self.rate = size / max(1e-9, self._clock.monotonic() - self._started)
        return body

    def _body(self, size: int) -> Buffer:
        """The next `size` bytes; what has come of them waits in `_filling` where the rest has not."""
        if self._filling is None:
            self._filling, self._filled = self._rooms.take(size) if size <= _MAP_ABOVE else _map(size), 0
        room = self._filling
        view = memoryview(room)
        while (left := size - self._filled) > 0:
            if self._ahead:
                count = min(left, len(self._ahead))
                view[self._filled : self._filled + count] = self._ahead[:count]
                self._ahead = self._ahead[count:]
                self._filled += count
            elif left >= _RECORD:
                self._filled += self._receive(view[self._filled :])
            else:
                self._ahead = self._room[: self._receive(self._room)]
        self._filling = None
        if isinstance(room, bytearray):
            self._rooms.keep(room)
        return room

    def _receive(self, view: memoryview) -> int:
        if isinstance(self._tls, TlsSocket):
            self._tls.look = self.look  # of half a record only it knows that there is more to come
        elif self.look is not None and not self.buffered and not self.look():
            raise NothingYetError
        if self._limit is not None and self._limit.active:
            view = view[: self._limit.piece(len(view))]  # a Unix socket would give megabytes at once
        count: int = self._tls.read(len(view), view)  # type: ignore[assignment]  # an int, when it is given a buffer
        if count == 0:
            raise WireClosedError("the connection was closed without a goodbye")
        self.bytes_received += count
        if self._limit is not None and self._limit.active:
            self.waiting = True
            self._limit.spend(count)  # what is not read fills the window, and the peer stops sending
            self.waiting = False
        return count


def _map(size: int) -> Buffer:
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise FrameError(f"no room for a frame part of {size} bytes: {error}") from error
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # a kernel without them
            pages.madvise(_HUGE_PAGES)
    return memoryview(pages)


def cut_off(tls: socket.socket) -> None:
    """End a connection from any thread: whoever blocks on it wakes with an error.

    `SSLSocket.shutdown` would turn the object into a plain socket under the feet of the other thread.
    """
    try:
        socket.socket.shutdown(tls, socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already
