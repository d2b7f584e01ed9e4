"""Keeps links alive and notices those that fell silent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from distensor.core.ids import DRIVER_RANK
from distensor.transport.link import OnLost, PeerLink
from distensor.transport.types import Timeouts

ROUNDS = 6
"""Rounds per `silent` interval. A peer is lost after one less without a byte, so that with the round in which it fell
silent it is not more than the interval."""
KEEP_ALIVE_EVERY = 2
"""Rounds between two keep-alives: about a second, where a peer may be silent for three."""
FIRST_SECONDS = 0.5
"""The first round comes early, so that round trips are known before a short job is over."""


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
    """Counts rounds without progress. Pure: numbers in, a reason or None out.

    Rounds, not seconds: whoever was itself held up, or asleep, has counted none of them.
    """

    quiet_rounds: int
    stuck_rounds: int
    seen: dict[int, _Seen] = field(default_factory=dict)

    def look(self, rank: int, *, received: int, sent: int, sending: bool, holding: bool = False) -> Loss | None:
        """Whether the peer counts as lost now. `holding`: it is us who do not read at the moment."""
        was = self.seen.setdefault(rank, _Seen())
        was.quiet_rounds = was.quiet_rounds + 1 if received == was.received and not holding else 0
        was.stuck_rounds = was.stuck_rounds + 1 if sending and sent == was.sent else 0
        was.received, was.sent = received, sent
        if was.quiet_rounds >= self.quiet_rounds:
            return Loss("not a byte came from it", self.quiet_rounds)
        if was.stuck_rounds >= self.stuck_rounds:
            return Loss("it took not a byte of what we send", self.stuck_rounds)
        return None


class Keeper:
    """One thread for all links of a data plane."""

    def __init__(
        self,
        links: Callable[[], Mapping[int, PeerLink]],
        timeouts: Timeouts,
        on_lost: OnLost,
        stopped: threading.Event,
    ) -> None:
        self._links = links
        self._every = timeouts.silent / ROUNDS
        self._on_lost = on_lost
        self._stopped = stopped
        self._met: set[int] = set()
        stuck = round(timeouts.stuck / self._every)
        patient = round(timeouts.driver_silent / self._every)
        self._ranks = Vigil(quiet_rounds=ROUNDS - 1, stuck_rounds=stuck)
        self._driver = Vigil(quiet_rounds=max(ROUNDS - 1, patient), stuck_rounds=stuck)

    def run(self) -> None:
        number, wait = 0, min(FIRST_SECONDS, self._every)
        while not self._stopped.wait(wait):
            wait = self._every
            for rank, link in self._links().items():
                self._visit(rank, link, speak=number % KEEP_ALIVE_EVERY == 0 or rank not in self._met)
                self._met.add(rank)
            number += 1

    def _visit(self, rank: int, link: PeerLink, *, speak: bool) -> None:
        if speak:
            link.keep_alive()
        stats = link.stats
        vigil = self._driver if rank == DRIVER_RANK else self._ranks
        loss = vigil.look(
            rank,
            received=stats.bytes_received,
            sent=stats.bytes_sent,
            sending=link.sending,
            holding=link.holding,
        )
        if loss is not None:
            self._on_lost(rank, f"{loss.reason} for {self._every * loss.rounds:g} s", False)
