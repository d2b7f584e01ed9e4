"""No claim is lost and none fills the memory, however long the hub is away and however often this process starts.

Every claim stands in the receipts before it is sent. The link keeps those that the hub has not answered; beyond MOST
they stay in the receipts only and are read again when there is room. Up to which moment all claims are known to be at
the hub is kept in a file, so that a new start goes on from there. The hub counts a unit once, however often it is
claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from distensor.comm import LinkState
from distensor.core.clock import Clock
from distensor.core.control import Unit
from distensor_server.books import Books
from distensor_server.feature import Feature
from distensor_server.hublink import HubLink
from distensor_server.journal import Journal
from distensor_server.picture import Picture
from distensor_server.statedir import StateDirectory, read_json, write_json

MOST = 20_000
"""Unanswered claims in memory, some 10 MB."""
BATCH = 2_000
"""Claims read from the receipts in one tick."""
SLACK_SECONDS = 60.0
"""How much earlier than necessary is read again: clocks are set, and files are written before messages are sent."""
OLDEST_SECONDS = 30 * 86400.0
SAVE_SECONDS = 60.0


class _Node(Protocol):
    """What is needed of `node.Node`, which makes this."""

    clock: Clock
    state: StateDirectory
    link: HubLink
    journal: Journal
    books: Books


class ClaimBacklog(Feature):
    """Decides where a claim waits, and feeds the link from the receipts."""

    def __init__(self, node: _Node) -> None:
        self._node = node
        self._path = node.state.root / "claims.json"
        self._backlog: Iterator[Unit] | None = None
        self._skipped_since: float | None = None
        self._clear_at = 0.0
        self._saved_at = 0.0

    def open(self) -> None:
        stored = (read_json(self._path) or {}).get("clear_at")
        now = self._node.clock.now()
        # Without the file nothing is known: then all that may still count is claimed again.
        self._clear_at = float(stored) if isinstance(stored, int | float) and 0 <= stored <= now else 0.0
        self._saved_at = self._clear_at
        self._backlog = self._node.books.since(max(self._clear_at - SLACK_SECONDS, now - OLDEST_SECONDS))
        self._feed()

    def close(self) -> None:
        self._save(within=0.0)

    def admit(self, unit: Unit, *, kept: bool) -> None:
        """To the link, unless that has its fill; also then when the claim is not in the receipts (the disk is full)."""
        if self._node.link.unanswered_claims < MOST or not kept:
            self._node.link.claim(unit)
        elif self._skipped_since is None:
            self._skipped_since = self._node.clock.now()
            self._node.journal.add("info", "hub", f"{MOST} claims wait for the hub: more wait in the receipts")

    def on_clock_set(self, by: float) -> None:
        if self._skipped_since is not None and by < 0:
            self._skipped_since += by
        if by < 0:
            self._clear_at += by

    def on_tick(self, picture: Picture) -> None:
        self._feed()
        if self._all_is_there(picture):
            self._clear_at = picture.now
        self._save(within=SAVE_SECONDS)

    def _all_is_there(self, picture: Picture) -> bool:
        waiting = self._backlog is not None or self._skipped_since is not None or self._node.link.unanswered_claims
        return picture.link.state is LinkState.CONNECTED and not waiting

    def _feed(self) -> None:
        room = MOST - self._node.link.unanswered_claims
        if self._backlog is None and self._skipped_since is not None and room >= MOST // 2:
            self._backlog = self._node.books.since(self._skipped_since - SLACK_SECONDS)
            self._skipped_since = None
        if self._backlog is None or room <= 0:
            return
        wanted = min(BATCH, room)
        read = 0
        for unit in islice(self._backlog, wanted):
            self._node.link.claim(unit)
            read += 1
        if read < wanted:
            self._backlog = None

    def _save(self, *, within: float) -> None:
        """At most once in `within` seconds of what it tells."""
        if self._clear_at != self._saved_at and abs(self._clear_at - self._saved_at) >= within:
            self._saved_at = self._clear_at
            value = {"v": 1, "clear_at": round(self._clear_at, 3)}
            self._node.journal.guarded(lambda: write_json(self._path, value))
