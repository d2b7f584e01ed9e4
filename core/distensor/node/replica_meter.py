"""What a rank sends to the other replicas of its weights in a step, as counted on its sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distensor.core import Axis, RankLayout

GRADIENT_BYTES = 4
"""Of an element, as all-reduces here send it."""


class ReplicaMeter:
    """Keeps the counters of the step before."""

    def __init__(self, layout: RankLayout, rank: int) -> None:
        self._how, self._elements = "", 0
        self.move(layout, rank)

    def move(self, layout: RankLayout, rank: int) -> None:
        """Among other members, over new connections, which count from zero."""
        self.replica = layout.coordinates(rank).dp
        ranks = range(layout.config.world_size)
        self._world = layout.config.world_size
        self._others = frozenset(other for other in ranks if layout.coordinates(other).dp != self.replica)
        self._members = len(layout.group_of(rank, Axis.DP))
        self._before = (0, 0)

    def begin(self, how: str, elements: int) -> None:
        """A job whose replicas agree by `how`, and in which this rank has gradients of so many elements."""
        self._how, self._elements = how, elements

    @property
    def _ring(self) -> int:
        return 2 * (self._members - 1) * GRADIENT_BYTES * self._elements // self._members

    def step(self, links: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Bytes since the last call, beside those of a ring all-reduce; None where there is one replica.

        Args:
            links: peer, sent and received of each, since the start; aggregators are those beyond the mesh.
        """
        if not self._others:
            return None
        own = [link for link in links if link["peer"] in self._others or link["peer"] >= self._world]
        now = sum(link["sent"] for link in own), sum(link["received"] for link in own)
        up, down = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        return {"how": self._how, "up": max(0, up), "down": max(0, down), "ring": self._ring}
