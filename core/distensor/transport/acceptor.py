"""Being dialed: strangers may be slow, wrong or hostile, and must never delay a peer.

A connection that says nothing waits on the doorstep. One that speaks proves itself in a thread of its own within a
fixed time; beyond a fixed number of unproven ones the oldest is dropped. Once every expected peer is there, connections
are closed unread.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from distensor.core.clock import Clock
from distensor.core.errors import HandshakeError
from distensor.transport.doorstep import Doorstep
from distensor.transport.handshake import Hello, Lane, RefusedError, answer, secure_accepted
from distensor.transport.listener import Listener, WakeUp
from distensor.transport.local_lanes import Connection, LocalMeeting
from distensor.transport.paths import path_of
from distensor.transport.sockets import prepare
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Address, PathKind, PeerId, Timeouts
from distensor.transport.wire import cut_off

MOST_UNPROVEN = 64
_SWEEP_EVERY = 0.25


class Lanes(Protocol):
    """Where proven connections go."""

    def reserve(self, rank: int, lane: Lane) -> str | None:
        """Keep this lane for the caller, or say why not."""

    def release(self, rank: int, lane: Lane) -> None:
        """The connection broke before it was added."""

    def add(self, rank: int, lane: Lane, connection: Connection) -> None:
        """The lane is open."""

    def wants_more(self) -> bool:
        """Whether any peer is still expected to dial."""


@dataclass(slots=True, eq=False)
class _Unproven:
    connection: socket.socket
    until: float
    path: PathKind


@dataclass(slots=True, eq=False)
class Acceptor:
    """Watches the listener in a thread of its own."""

    listener: Listener
    context: ssl.SSLContext
    me: PeerId
    expected: frozenset[int]
    timeouts: Timeouts
    clock: Clock
    lanes: Lanes
    local: LocalMeeting | None = None
    """Where processes of the same user are met instead; None for nowhere."""
    on_path: Callable[[int, PathKind], None] = lambda _rank, _path: None
    """Told by which way a peer came, before its lane is added."""
    refused: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    """The latest reasons why a connection was turned away."""
    _wake: WakeUp = field(default_factory=WakeUp)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _unproven: dict[_Unproven, None] = field(default_factory=dict)
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="distensor-accept", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()
        self._drop(lambda _: True)

    def _run(self) -> None:
        doorstep = Doorstep(self.listener, self._wake.receiver)
        while not self._stopped:
            for connection, since in doorstep.spoken(_SWEEP_EVERY, self.clock.monotonic(), self.timeouts.handshake):
                if self._stopped or not self.lanes.wants_more():
                    connection.close()
                else:
                    self._prove(connection, since + self.timeouts.handshake, _path_from(connection))
            now = self.clock.monotonic()
            self._drop(lambda unproven: unproven.until < now)  # noqa: B023 - called at once
            if not self.lanes.wants_more():
                doorstep.close()
        doorstep.close()

    def take_relayed(self, connection: socket.socket) -> None:
        """A relay has joined this connection to one of a peer."""
        self._prove(connection, self.clock.monotonic() + self.timeouts.handshake, PathKind.RELAY)

    def _prove(self, connection: socket.socket, until: float, path: PathKind) -> None:
        unproven = _Unproven(connection, until, path)
        with self._lock:
            if len(self._unproven) >= MOST_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                cut_off(oldest.connection)
            self._unproven[unproven] = None
        threading.Thread(target=self._meet, args=(unproven,), name="distensor-handshake", daemon=True).start()

    def _drop(self, which: Callable[[_Unproven], bool]) -> None:
        with self._lock:
            for unproven in [candidate for candidate in self._unproven if which(candidate)]:
                del self._unproven[unproven]
                cut_off(unproven.connection)

    def _meet(self, unproven: _Unproven) -> None:
        try:
            self._admit(unproven, self._wrap(unproven))
        except (HandshakeError, OSError) as error:
            self.refused.append(str(error) or type(error).__name__)
        finally:
            with self._lock:
                self._unproven.pop(unproven, None)

    def _wrap(self, unproven: _Unproven) -> TlsSocket:
        """TLS around the connection; the object that may be cut off from outside changes with it."""
        raw = unproven.connection
        with ExitStack() as undo:
            undo.callback(raw.close)
            raw.settimeout(self.timeouts.handshake)
            prepare(raw)
            tls = TlsSocket.over(raw, self.context, server=True)
            undo.pop_all()
        with self._lock:
            unproven.connection = tls
            dropped = unproven not in self._unproven
        if dropped:
            tls.close()
            raise ConnectionAbortedError("dropped: too slow, or too many others that proved nothing")
        return tls

    def _admit(self, unproven: _Unproven, tls: TlsSocket) -> None:
        """Recognise the peer and hand its connection over; closes it otherwise."""
        with ExitStack() as undo:
            undo.callback(tls.close)
            hello = self._recognise(unproven, tls)
            connection = self._welcome(tls, hello)
            if connection is tls:
                undo.pop_all()
        self.on_path(hello.rank, unproven.path if connection is tls else PathKind.HERE)
        self.lanes.add(hello.rank, hello.lane, connection)

    def _spare(self, unproven: _Unproven) -> None:
        """From here on nobody cuts this connection off for being slow."""
        with self._lock:
            if unproven not in self._unproven:
                raise ConnectionAbortedError("dropped: too slow, or too many others that proved nothing")
            del self._unproven[unproven]

    def _recognise(self, unproven: _Unproven, tls: TlsSocket) -> Hello:
        try:
            hello = secure_accepted(tls, me=self.me, expected=self.expected)
            self._spare(unproven)
            refusal = self.lanes.reserve(hello.rank, hello.lane)
            if refusal is not None:
                raise RefusedError(refusal)
        except RefusedError as error:
            answer(tls, self.me, str(error))
            raise
        return hello

    def _welcome(self, tls: TlsSocket, hello: Hello) -> Connection:
        """The connection that the lane uses from here on."""
        try:
            with ExitStack() as undo:
                guest = None
                if self.local is not None:
                    guest = self.local.join(tls, hello.invitation, self.timeouts.handshake)
                if guest is not None:
                    undo.callback(guest.connection.close)
                answer(tls, self.me, None, joined=guest is not None)
                connection: Connection = tls if guest is None else guest.confirm()
                undo.pop_all()
            connection.settimeout(None)
        except (HandshakeError, OSError):
            self.lanes.release(hello.rank, hello.lane)
            raise
        return connection


def _path_from(connection: socket.socket) -> PathKind:
    try:
        host = str(connection.getpeername()[0])
    except OSError:
        return PathKind.PUBLIC  # it has gone; the handshake will say so
    return path_of(Address(host=host, port=0))
