"""Keeps links alive and notices those that fell silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distensor.transport.link import OnLost, PeerLink

ROUNDS = 3
"""Rounds per `silent` interval: a keep-alive in each, and a peer is lost after this many without a byte."""


@dataclass(slots=True)
class _Seen:
    received: int = -1
    sent: int = -1
    quiet_rounds: int = 0
    stuck_rounds: int = 0


@dataclass(slots=True)
class Vigil:
    """Counts rounds without progress. Pure: numbers in, a reason or None out."""

    seen: dict[int, _Seen] = field(default_factory=dict)

    def look(self, rank: int, *, received: int, sent: int, sending: bool) -> str | None:
        """Why the peer counts as lost now, if it does."""
        was = self.seen.setdefault(rank, _Seen())
        was.quiet_rounds = was.quiet_rounds + 1 if received == was.received else 0
        was.stuck_rounds = was.stuck_rounds + 1 if sending and sent == was.sent else 0
        was.received, was.sent = received, sent
        if was.quiet_rounds >= ROUNDS:
            return "not a byte came from it"
        if was.stuck_rounds >= ROUNDS:
            return "it took not a byte of what we send"
        return None


class Keeper:
    """One thread for all links of a data plane."""

    def __init__(
        self, links: Callable[[], Mapping[int, PeerLink]], silent: float, on_lost: OnLost, stopped: threading.Event
    ) -> None:
        self._links = links
        self._silent = silent
        self._on_lost = on_lost
        self._stopped = stopped
        self._vigil = Vigil()

    def run(self) -> None:
        while not self._stopped.wait(self._silent / ROUNDS):
            for rank, link in self._links().items():
                self._visit(rank, link)

    def _visit(self, rank: int, link: PeerLink) -> None:
        link.keep_alive()
        stats = link.stats
        reason = self._vigil.look(rank, received=stats.bytes_received, sent=stats.bytes_sent, sending=link.sending)
        if reason is not None:
            self._on_lost(rank, f"{reason} for {self._silent:g} s", False)
