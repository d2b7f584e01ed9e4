"""Reaching one peer that listens, again and again until it is there or time is up."""

from __future__ import annotations

import socket
import ssl
import threading
from dataclasses import dataclass

from distensor.core.clock import Clock
from distensor.core.errors import HandshakeError, TransportTimeoutError
from distensor.transport.handshake import Lane, RetryableHandshakeError, secure_dialed
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
    _socket: socket.socket | None = None

    def lane(self, lane: Lane) -> ssl.SSLSocket:
        """One connection, recognised at both ends.

        Raises:
            HandshakeError: the peer is the wrong one, or refuses us.
            TransportTimeoutError: the deadline passed; the last reason is in the message.
        """
        pause, reason = _FIRST_PAUSE, "not tried"
        while (remaining := self.deadline - self.clock.monotonic()) > 0:
            try:
                return self._try(lane, remaining)
            except (RetryableHandshakeError, OSError) as error:
                reason = str(error) or type(error).__name__
            except HandshakeError as error:
                raise HandshakeError(f"{peer_name(self.rank)} at {self.address}: {error}") from error
            if self.stopped.wait(min(pause, remaining)):
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise TransportTimeoutError(f"{peer_name(self.rank)} at {self.address} cannot be reached: {reason}")

    def _try(self, lane: Lane, remaining: float) -> ssl.SSLSocket:
        raw = socket.create_connection((self.address.host, self.address.port), timeout=remaining)
        self._socket = raw
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = secure_dialed(raw, self.context, me=self.me, expected=self.rank, lane=lane)
        tls.settimeout(None)
        return tls

    def interrupt(self) -> None:
        """Make `lane` return soon, from another thread; `stopped` must be set already."""
        if self._socket is not None:
            cut_off(self._socket)
