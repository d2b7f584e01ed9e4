"""Reaching one peer that listens, again and again until it is there or time is up."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from distensor.core.clock import Clock
from distensor.core.errors import HandshakeError
from distensor.transport import relayed
from distensor.transport.handshake import Lane, NobodyCameError, RetryableHandshakeError, recognise_dialed, say_hello
from distensor.transport.local_lanes import Connection, LocalMeeting
from distensor.transport.paths import Attempt, Race, Way, path_of
from distensor.transport.sockets import prepare
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Address, Credentials, PathKind, PeerId, peer_name

_CONNECT_SECONDS = 10.0
"""An address that has not answered for so long is tried anew, rather than held on to when nobody wants it any more."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


@dataclass(slots=True, eq=False)
class Dialer:
    """Opens both lanes to one peer."""

    me: PeerId
    rank: int
    addresses: tuple[Address, ...]
    context: ssl.SSLContext
    deadline: float
    clock: Clock
    stopped: threading.Event
    local: LocalMeeting | None = None
    """Where the peer is met instead, if it is a process of the same user; None for nowhere."""
    relay: Address | None = None
    """What to ask when no address leads to the peer."""
    credentials: Credentials | None = None
    """What the relay is shown."""
    reason: str = "no answer to the TLS handshake"
    """Why the peer is not there yet."""
    path: PathKind | None = None
    """The way that led to it."""
    _race: Race | None = None
    _known: Way | None = None

    def lane(self, lane: Lane) -> Connection | None:
        """One connection, recognised at both ends; None when time is up or dialing was stopped.

        Raises:
            HandshakeError: the peer is the wrong one, or refuses us.
        """
        pause = _FIRST_PAUSE
        while (remaining := self.deadline - self.clock.monotonic()) > 0 and not self.stopped.is_set():
            try:
                return self._try(lane, remaining)
            except (RetryableHandshakeError, OSError) as error:
                self.reason = str(error) or type(error).__name__
                self._known = None
                if isinstance(error, NobodyCameError):
                    self.local = None
            except HandshakeError as error:
                raise HandshakeError(f"{self}: {error}") from error
            self.stopped.wait(min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def __str__(self) -> str:
        return f"{peer_name(self.rank)} at {' or '.join(map(str, self.addresses))}"

    def _try(self, lane: Lane, remaining: float) -> Connection:
        self._race = race = self._ways()
        if self.stopped.is_set():  # it may have been set before `interrupt` could see the race
            race.stop()
        way, tls = race.run(remaining)
        local = None if way.path is PathKind.RELAY else self.local
        connection = say_hello(tls, me=self.me, lane=lane, local=local)
        connection.settimeout(None)
        # The second lane takes the way that the first one found.
        self._known, self.path = way, PathKind.HERE if connection is not tls else way.path
        return connection

    def _ways(self) -> Race:
        if self._known is not None:
            return Race([self._known], None, self.clock)
        direct = [Way(path=path_of(each), name=str(each), open=self._direct(each)) for each in self.addresses]
        relay = self.relay
        if relay is None:
            return Race(direct, None, self.clock)
        return Race(direct, Way(path=PathKind.RELAY, name=str(relay), open=self._relayed(relay)), self.clock)

    def _direct(self, address: Address) -> Callable[[float, Attempt], TlsSocket]:
        def open_(timeout: float, attempt: Attempt) -> TlsSocket:
            return self._recognise(_connect(address, timeout, attempt), attempt)

        return open_

    def _relayed(self, relay: Address) -> Callable[[float, Attempt], TlsSocket]:
        def open_(timeout: float, attempt: Attempt) -> TlsSocket:
            assert self.credentials is not None  # given together with the relay
            raw = _connect(relay, timeout, attempt)
            with ExitStack() as undo:
                undo.callback(raw.close)
                relayed.dial(relay, self.credentials, self.rank, raw)
                undo.pop_all()
            return self._recognise(raw, attempt)

        return open_

    def _recognise(self, raw: socket.socket, attempt: Attempt) -> TlsSocket:
        tls = recognise_dialed(raw, self.context, me=self.me, expected=self.rank)
        attempt.hold(tls)
        return tls

    def interrupt(self) -> None:
        """Make `lane` return soon, from another thread; `stopped` must be set already."""
        if self._race is not None:
            self._race.stop()


def _connect(address: Address, timeout: float, attempt: Attempt) -> socket.socket:
    raw = socket.create_connection((address.host, address.port), timeout=min(timeout, _CONNECT_SECONDS))
    with ExitStack() as undo:
        undo.callback(raw.close)
        raw.settimeout(timeout)
        prepare(raw)
        attempt.hold(raw)
        undo.pop_all()
    return raw
