"""Connections through a relay: to a peer that is parked there, and being dialed while parked there.

A relay joins two connections of members of one job (`comm.relay_words`); what goes over them is our TLS from end to
end, so a relay can do no more harm than any other stretch of the way.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

from distensor.comm.address import parse_address
from distensor.comm.relay_words import LONGEST, Role, read_line, read_nonce, write_wish
from distensor.core.errors import AuthenticationError, HandshakeError, HubProtocolError
from distensor.transport.types import Address, Credentials
from distensor.transport.wire import cut_off

PARKED = 2
"""Connections of a member that wait to be dialed: a peer opens two, one after the other."""
CONNECT_SECONDS = 10.0
_PAUSE = 1.0


def relay_at(text: str) -> Address | None:
    """The relay that a hub named; None for none.

    Raises:
        ConfigError: not host:port.
    """
    if not text:
        return None
    address = parse_address(text)
    return Address(host=address.host, port=address.port)


def dial(relay: Address, credentials: Credentials, to: int, raw: socket.socket) -> None:
    """Ask on the connected socket for a peer; returns when every further byte is its own.

    Raises:
        HandshakeError: the relay does not take us, or the peer is not there; worth another try.
        OSError: the connection broke or took too long.
    """
    _wish(raw, credentials, Role.DIAL, to)
    _joined(raw, relay)


def _wish(raw: socket.socket, credentials: Credentials, role: Role, to: int) -> None:
    try:
        nonce = read_nonce(read_line(_line(raw)))
    except HubProtocolError as error:
        raise ConnectionError(f"the relay is none: {error}") from error
    raw.sendall(write_wish(role, to, nonce, credentials.certificate_pem, credentials.key_pem))


def _joined(raw: socket.socket, relay: Address) -> None:
    while True:
        try:
            said = read_line(_line(raw))
        except HubProtocolError as error:
            raise ConnectionError(f"the relay at {relay} is none: {error}") from error
        if "error" in said:
            raise ConnectionError(f"the relay at {relay} says: {str(said['error'])[:300]}")
        if said.get("joined"):
            return


def _line(raw: socket.socket) -> bytes:
    """One line and not a byte more: what follows it belongs to TLS."""
    line = bytearray()
    while len(line) < LONGEST and not line.endswith(b"\n"):
        byte = raw.recv(1)
        if not byte:
            raise ConnectionError("the relay closed the connection")
        line += byte
    return bytes(line)


class Parking:
    """Keeps connections parked at a relay, and hands on those that a peer has been joined to."""

    def __init__(
        self,
        relay: Address,
        credentials: Credentials,
        rank: int,
        hand_on: Callable[[socket.socket], None],
        wants_more: Callable[[], bool],
    ) -> None:
        self._relay, self._credentials, self._rank = relay, credentials, rank
        self._hand_on, self._wants_more = hand_on, wants_more
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.reason = ""
        """Why nothing is parked there, as far as that is known."""
        self._threads = [
            threading.Thread(target=self._run, name="distensor-parked", daemon=True) for _ in range(PARKED)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            for raw in self._open:
                cut_off(raw)

    def join(self, timeout: float) -> None:
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped.is_set() and self._wants_more():
            try:
                self._park_once()
            except (OSError, HandshakeError, AuthenticationError) as error:
                self.reason = str(error)
                self._stopped.wait(_PAUSE)

    def _park_once(self) -> None:
        raw = socket.create_connection((self._relay.host, self._relay.port), CONNECT_SECONDS)
        with ExitStack() as undo:
            undo.callback(raw.close)
            with self._lock:
                if self._stopped.is_set():
                    return
                self._open.add(raw)
            undo.callback(self._forget, raw)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _wish(raw, self._credentials, Role.PARK, self._rank)
            raw.settimeout(None)  # until somebody dials, or `stop`
            _joined(raw, self._relay)
            self._forget(raw)
            undo.pop_all()
        self._hand_on(raw)

    def _forget(self, raw: socket.socket) -> None:
        with self._lock:
            self._open.discard(raw)
