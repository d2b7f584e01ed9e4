"""Which packet leaves when: every packet crosses the sender's line up, then the receiver's line down. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from distensor.testing.homenet.packets import destination, opens_connection
from distensor.testing.homenet.profiles import Line


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One host as the router sees it. `closed`: nobody opens a connection to it from outside."""

    name: str
    addresses: tuple[bytes, ...]
    up: Line
    down: Line
    closed: bool = False


class Router:
    """Packets in with the time, packets out at theirs."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = dict(places)
        self._by_address = {address: place for place in places.values() for address in place.addresses}
        self._cut: set[frozenset[str]] = set()
        self._waiting: list[tuple[float, int, Place, bool, bytes]] = []
        self._count = itertools.count()

    def cut(self, one: str, other: str, *, cut: bool) -> None:
        """Take the way between two hosts away, or give it back. Packets that are on it arrive."""
        (self._cut.add if cut else self._cut.discard)(frozenset((one, other)))

    def take(self, source: str, packet: bytes, now: float) -> None:
        """A packet leaves a host."""
        place = self._by_address.get(destination(packet))
        if place is None or frozenset((source, place.name)) in self._cut:
            return
        if place.closed and opens_connection(packet):
            return
        due = self._places[source].up.offer(now, len(packet))
        if due is not None:
            self._wait(due, place, False, packet)

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """The packets that reach their host by now."""
        arrived: list[tuple[str, bytes]] = []
        while self._waiting and self._waiting[0][0] <= now:
            at, _, place, crossed, packet = heapq.heappop(self._waiting)
            if crossed:
                arrived.append((place.name, packet))
            elif (due := place.down.offer(at, len(packet))) is not None:
                self._wait(due, place, True, packet)
        return arrived

    @property
    def next_at(self) -> float | None:
        """When to call `due` next."""
        return self._waiting[0][0] if self._waiting else None

    def _wait(self, due: float, place: Place, crossed: bool, packet: bytes) -> None:
        heapq.heappush(self._waiting, (due, next(self._count), place, crossed, packet))
