"""Reaching one peer that listens, again and again until it is there or time is up."""

from __future__ import annotations

import socket
import ssl
import threading
from dataclasses import dataclass

from distensor.core.clock import Clock
from distensor.core.errors import HandshakeError
from distensor.transport.handshake import Lane, NobodyCameError, RetryableHandshakeError, secure_dialed
from distensor.transport.local_lanes import Connection, LocalMeeting
from distensor.transport.sockets import prepare
from distensor.transport.types import Address, PeerId, peer_name
from distensor.transport.wire import cut_off

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


@dataclass(slots=True, eq=False)
class Dialer:
    """Opens both lanes to one peer."""

    me: PeerId
    rank: int
    address: Address
    context: ssl.SSLContext
    deadline: float
    clock: Clock
    stopped: threading.Event
    local: LocalMeeting | None = None
    """Where the peer is met instead, if it is a process of the same user; None for nowhere."""
    reason: str = "no answer to the TLS handshake"
    """Why the peer is not there yet."""
    _socket: socket.socket | None = None

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
                if isinstance(error, NobodyCameError):
                    self.local = None
            except HandshakeError as error:
                raise HandshakeError(f"{self}: {error}") from error
            self.stopped.wait(min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def __str__(self) -> str:
        return f"{peer_name(self.rank)} at {self.address}"

    def _try(self, lane: Lane, remaining: float) -> Connection:
        raw = socket.create_connection((self.address.host, self.address.port), timeout=remaining)
        self._socket = raw
        prepare(raw)
        connection = secure_dialed(raw, self.context, me=self.me, expected=self.rank, lane=lane, local=self.local)
        connection.settimeout(None)
        return connection

    def interrupt(self) -> None:
        """Make `lane` return soon, from another thread; `stopped` must be set already."""
        if self._socket is not None:
            cut_off(self._socket)
