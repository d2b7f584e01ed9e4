"""Keeps links alive and notices those that fell silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from distensor.transport.link import OnLost, PeerLink

ROUNDS = 3
"""Rounds per `silent` interval: a keep-alive in each, and a peer is lost after this many without a byte."""
FIRST_SECONDS = 0.5
"""The first round comes early, so that round trips are known before a short job is over."""
STUCK_ROUNDS = 10 * ROUNDS
"""Rounds in which a peer talks but takes nothing: it may be too busy to read, or the network is broken one way."""


@dataclass(slots=True)
class _Seen:
    received: int = -1
    sent: int = -1
    quiet_rounds: int = 0
    stuck_rounds: int = 0


class Loss(NamedTuple):
    """What was not seen, and for how many rounds."""

    reason: str
    rounds: int


@dataclass(slots=True)
class Vigil:
    """Counts rounds without progress. Pure: numbers in, a reason or None out."""

    seen: dict[int, _Seen] = field(default_factory=dict)

    def look(self, rank: int, *, received: int, sent: int, sending: bool, holding: bool = False) -> Loss | None:
        """Whether the peer counts as lost now. `holding`: it is us who do not read at the moment."""
        was = self.seen.setdefault(rank, _Seen())
        was.quiet_rounds = was.quiet_rounds + 1 if received == was.received and not holding else 0
        was.stuck_rounds = was.stuck_rounds + 1 if sending and sent == was.sent else 0
        was.received, was.sent = received, sent
        if was.quiet_rounds >= ROUNDS:
            return Loss("not a byte came from it", ROUNDS)
        if was.stuck_rounds >= STUCK_ROUNDS:
            return Loss("it took not a byte of what we send", STUCK_ROUNDS)
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
        every = self._silent / ROUNDS
        wait = min(FIRST_SECONDS, every)
        while not self._stopped.wait(wait):
            wait = every
            for rank, link in self._links().items():
                self._visit(rank, link)

    def _visit(self, rank: int, link: PeerLink) -> None:
        link.keep_alive()
        stats = link.stats
        loss = self._vigil.look(
            rank,
            received=stats.bytes_received,
            sent=stats.bytes_sent,
            sending=link.sending,
            holding=link.mailbox.holds(rank),
        )
        if loss is not None:
            self._on_lost(rank, f"{loss.reason} for {self._silent * loss.rounds / ROUNDS:g} s", False)
