"""The ways to a peer, tried side by side: the one on which the right certificate shows first is taken.

After RFC 8305 ("happy eyeballs"): one attempt begins a little after the other, and none waits for the failure of the
one before. An address alone proves nothing here, since 192.168.1.5 is another machine in every home: a way counts only
once its TLS has shown the peer.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distensor.core.clock import Clock
from distensor.core.errors import HandshakeError
from distensor.transport.handshake import RetryableHandshakeError
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Address, PathKind
from distensor.transport.wire import cut_off

STAGGER_SECONDS = 0.25
"""Between the beginnings of two attempts (the value that RFC 8305 recommends)."""
RELAY_AFTER_SECONDS = 3.0
"""How long direct ways are tried before a relay is asked; at once when all of them have failed."""


def path_of(address: Address) -> PathKind:
    """What kind of way an address is. A name, which only the owner of a node can have set, counts as public."""
    try:
        host = ipaddress.ip_address(address.host.partition("%")[0])
    except ValueError:
        return PathKind.HERE if address.host == "localhost" else PathKind.PUBLIC
    host = getattr(host, "ipv4_mapped", None) or host  # how a socket of both families shows IPv4
    if host.is_loopback:
        return PathKind.HERE
    if host.is_private or host.is_link_local:
        return PathKind.LAN
    return PathKind.IPV6 if host.version == 6 else PathKind.PUBLIC


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to a peer. `open(timeout, attempt)` gives a connection on which the peer has been recognised."""

    path: PathKind
    name: str
    open: Callable[[float, Attempt], TlsSocket]


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of one way. Its socket is cut off when another was faster."""

    way: Way
    over: bool = False
    failure: Exception | None = None
    _held: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, raw: socket.socket) -> None:
        """Whoever makes a socket shows it here, so that it can be cut off from outside.

        Raises:
            OSError: nobody wants it any more.
        """
        with self._lock:
            self._held.append(raw)
            if self.over:
                raise ConnectionAbortedError("another way was faster, or dialing was stopped")

    def let_go(self) -> None:
        """The connection is its user's now: it is not cut off any more."""
        with self._lock:
            self._held = []

    def cancel(self) -> None:
        with self._lock:
            self.over = True
            held, self._held = self._held, []
        for raw in held:
            cut_off(raw)


class Race:
    """Tries ways until one leads to the peer."""

    def __init__(self, direct: Sequence[Way], relay: Way | None, clock: Clock) -> None:
        self._direct, self._relay, self._clock = direct, relay, clock
        self._changed = threading.Condition()
        self._attempts: list[Attempt] = []
        self._winner: tuple[Way, TlsSocket] | None = None
        self._stopped = False

    def run(self, timeout: float) -> tuple[Way, TlsSocket]:
        """The first way that leads there.

        Raises:
            HandshakeError, OSError: none does; why the likeliest does not. An OSError or RetryableHandshakeError, where
                trying again may help, comes before others.
        """
        if len(self._direct) == 1 and self._relay is None:
            return self._alone(self._direct[0], timeout)
        deadline = self._clock.monotonic() + timeout
        for index, way in enumerate(self._direct):
            if index and self._wait(STAGGER_SECONDS, deadline, failed=index):
                break
            self._begin(way, deadline)
        if self._relay is not None:
            asked = RELAY_AFTER_SECONDS - STAGGER_SECONDS * max(0, len(self._direct) - 1)
            if not self._wait(asked, deadline, failed=len(self._direct)):
                self._begin(self._relay, deadline)
        self._wait(timeout, deadline, failed=len(self._attempts))
        return self._decide()

    def stop(self) -> None:
        """Make `run` end soon, from another thread."""
        with self._changed:
            self._stopped = True
            attempts = list(self._attempts)
            self._changed.notify_all()
        for attempt in attempts:
            attempt.cancel()

    def _alone(self, way: Way, timeout: float) -> tuple[Way, TlsSocket]:
        attempt = self._attempt(way)
        tls = way.open(timeout, attempt)
        attempt.let_go()
        return way, tls

    def _attempt(self, way: Way) -> Attempt:
        attempt = Attempt(way)
        with self._changed:
            self._attempts.append(attempt)
            attempt.over = self._stopped
        return attempt

    def _begin(self, way: Way, deadline: float) -> None:
        attempt = self._attempt(way)
        thread = threading.Thread(target=self._try, args=(attempt, deadline), name="distensor-way", daemon=True)
        thread.start()

    def _try(self, attempt: Attempt, deadline: float) -> None:
        try:
            tls = attempt.way.open(max(0.1, deadline - self._clock.monotonic()), attempt)
        except (HandshakeError, OSError) as error:
            with self._changed:
                attempt.failure = error
                self._changed.notify_all()
            return
        with self._changed:
            late = self._winner is not None or self._stopped
            if not late:
                self._winner = attempt.way, tls
                attempt.let_go()
            self._changed.notify_all()
        if late:
            tls.close()

    def _wait(self, seconds: float, deadline: float, *, failed: int) -> bool:
        """Wait for a winner, for so many failures, or for the time; whether it is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or sum(a.failure is not None for a in self._attempts) >= failed,
                max(0.0, min(seconds, deadline - self._clock.monotonic())),
            )
            return self._over

    @property
    def _over(self) -> bool:
        return self._winner is not None or self._stopped

    def _decide(self) -> tuple[Way, TlsSocket]:
        with self._changed:
            winner, attempts = self._winner, list(self._attempts)
            self._stopped = True
        for attempt in attempts:
            if winner is None or attempt.way is not winner[0]:
                attempt.cancel()
        if winner is not None:
            return winner
        raise _worth_saying(attempts)


def _worth_saying(attempts: Sequence[Attempt]) -> Exception:
    told = [(a.way, a.failure or TimeoutError("no answer in time")) for a in attempts]
    words = "; ".join(f"{way.path.value} {way.name}: {error}" for way, error in told)
    if all(isinstance(e, HandshakeError) and not isinstance(e, RetryableHandshakeError) for _, e in told) and told:
        return HandshakeError(words)
    return ConnectionError(words or "dialing was stopped")
