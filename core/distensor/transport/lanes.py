"""Pairs up the two connections of each peer while everybody meets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from distensor.transport.handshake import Lane
from distensor.transport.local_lanes import Connection
from distensor.transport.types import peer_name

OnPair = Callable[[int, Connection, Connection], None]
"""Called with (rank, the connection to send on, the connection to read from)."""


class LaneTable:
    """Connections that are proven but not yet a pair."""

    def __init__(self, on_pair: OnPair) -> None:
        self._on_pair = on_pair
        self._lock = threading.Lock()
        self._expected: set[int] = set()
        self._reserved: set[tuple[int, Lane]] = set()
        self._waiting: dict[tuple[int, Lane], Connection] = {}
        self._closed = False

    def expect(self, ranks: Collection[int]) -> None:
        self._expected = set(ranks)

    def wants_more(self) -> bool:
        with self._lock:
            return bool(self._expected) and not self._closed

    def reserve(self, rank: int, lane: Lane) -> str | None:
        """Keep this lane for the caller, or say why not."""
        with self._lock:
            if self._closed:
                return "this peer is closing"
            if (rank, lane) in self._reserved:
                return f"{peer_name(rank)} is connected already"
            self._reserved.add((rank, lane))
            return None

    def release(self, rank: int, lane: Lane) -> None:
        with self._lock:
            self._reserved.discard((rank, lane))

    def add(self, rank: int, lane: Lane, connection: Connection, *, dialed: bool = False) -> None:
        """Take an open lane; with the second one of a peer, the pair is handed on."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._waiting[rank, lane] = connection
            if any((rank, each) not in self._waiting for each in Lane):
                return
            from_dialer = self._waiting.pop((rank, Lane.FROM_DIALER))
            to_dialer = self._waiting.pop((rank, Lane.TO_DIALER))
            self._expected.discard(rank)
        outbound, inbound = (from_dialer, to_dialer) if dialed else (to_dialer, from_dialer)
        self._on_pair(rank, outbound, inbound)

    def close(self) -> None:
        """Close what has no pair, and everything that still comes."""
        with self._lock:
            self._closed = True
            for connection in self._waiting.values():
                connection.close()
            self._waiting.clear()
