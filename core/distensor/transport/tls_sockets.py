"""TLS over a connected socket, with the records made and taken apart in our own memory.

`ssl.SSLSocket` lets OpenSSL call the kernel: twice for each record of 16 KB that comes, once for each that leaves. Here
OpenSSL works on buffers (`ssl.MemoryBIO`) and the kernel is asked once for many records, so a frame's prefix, header
and body leave with one call. And what the kernel does not take at once can wait for somebody else to send it, which
is how a message leaves from its caller's own thread without ever making it wait.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from distensor.core.clock import SYSTEM_CLOCK
from distensor.transport.types import Buffer, NothingYetError

_PIECE = 1 << 17
"""Plain bytes that become records before the kernel gets them."""
_ROOM = _PIECE + (1 << 10)
"""What one call takes from the kernel: the records of a piece, with what they add."""
_DO_NOT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)


class TlsSocket(socket.socket):
    """A connected TCP socket that speaks TLS. One thread at a time; `read` and `write` share OpenSSL's object."""

    __slots__ = ("_incoming", "_left", "_outgoing", "_room", "_session", "context", "look")

    context: ssl.SSLContext
    look: Callable[[], bool] | None
    """Asked before each read that might block: whether something has come. None: reads block, as in the handshake."""

    @classmethod
    def over(cls, raw: socket.socket, context: ssl.SSLContext, *, server: bool = False) -> TlsSocket:
        """Take `raw` over, with its timeout; `raw` itself is nothing any more. `do_handshake` comes first.

        Raises:
            OSError: the connection is gone already; `raw` is closed.
        """
        timeout = raw.gettimeout()
        tls = cls(raw.family, raw.type, raw.proto, fileno=raw.detach())
        with ExitStack() as undo:
            undo.callback(tls.close)
            tls.settimeout(timeout)
            tls._begin(context, server)
            undo.pop_all()
        return tls

    def _begin(self, context: ssl.SSLContext, server: bool) -> None:
        self.context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._room: memoryview | None = None
        self._left = memoryview(b"")
        self.look = None

    def do_handshake(self) -> None:
        """Prove both ends to each other, within the socket's timeout in all.

        Raises:
            ssl.SSLError: the other end is not what it should be, or thinks so of us. It has been told.
            ssl.SSLEOFError: the connection ended.
            OSError: it broke, or took too long.
        """
        patience = self.gettimeout()
        deadline = None if patience is None else SYSTEM_CLOCK.monotonic() + patience
        try:
            while not self._shaken():
                if deadline is not None:
                    self.settimeout(max(1e-3, deadline - SYSTEM_CLOCK.monotonic()))
                if not self._fill():
                    raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "the connection was closed during the handshake")
        except ssl.SSLError:
            with suppress(OSError):  # whoever has gone needs no alert
                self._flush()
            raise
        self.settimeout(patience)

    def _shaken(self) -> bool:
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        self._flush()
        return True

    def getpeercert(self) -> dict[str, Any] | None:
        """The other end's certificate, as `ssl.SSLSocket.getpeercert` gives it."""
        return self._session.getpeercert()

    def cipher(self) -> tuple[str, str, int] | None:
        return self._session.cipher()

    def pending(self) -> int:
        """Bytes that have left the kernel and not been read, some of them maybe of half a record."""
        return self._session.pending() + self._incoming.pending

    def read(self, size: int, buffer: memoryview) -> int:
        """Up to `size` bytes into `buffer`; 0 where the connection has ended.

        Raises:
            NothingYetError: `look` found nothing. Half a record that has come is kept for the next call.
            OSError: it broke.
        """
        while True:
            if not self._incoming.pending and not self._session.pending() and not self._fill():
                return 0
            try:
                # An int, when it is given a buffer.
                return self._session.read(size, buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if self._outgoing.pending:  # an answer to a renewal of keys
                    self._flush()
                if not self._fill():
                    return 0

    def write(self, data: Buffer) -> int:
        """Send the beginning of `data`; how many bytes that was.

        Raises:
            OSError: the connection broke.
        """
        return self.gather((data,))

    def gather(self, parts: Sequence[Buffer]) -> int:
        """Send the beginning of `parts`, one after the other, with one call; how many bytes that was."""
        sent = 0
        for part in parts:
            count = self._session.write(memoryview(part)[: _PIECE - sent]) if len(part) else 0
            sent += count
            if count < len(part):
                break
        self._flush()
        return sent

    def offer(self, parts: Sequence[Buffer]) -> bool:
        """Send all of `parts` as far as the kernel takes it without waiting; whether that was everything.

        What is left is kept, and leaves with `flush` or before whatever is written next. For sockets without a timeout.
        """
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[self._session.write(view) :]
        waiting = self._pending()
        try:
            count = self.send(waiting, _DO_NOT_WAIT)
        except BlockingIOError:
            count = 0
        self._left = waiting[count:]
        return not self._left

    def flush(self) -> None:
        """Send what `offer` has left.

        Raises:
            OSError: the connection broke.
        """
        self._flush()

    def _pending(self) -> memoryview:
        made = self._outgoing.read()
        if not self._left:
            return memoryview(made)
        return memoryview(b"".join((self._left, made)))

    def _flush(self) -> None:
        waiting = self._pending()
        self._left = memoryview(b"")
        if waiting:
            self.sendall(waiting)

    def _fill(self) -> int:
        """Take what has come; 0 where nothing will come any more."""
        if self.look is not None and not self.look():
            raise NothingYetError
        if self._room is None:
            self._room = memoryview(bytearray(_ROOM))
        count = self.recv_into(self._room)
        self._incoming.write(self._room[:count])
        return count
