"""What the replicas of a job send each other in a step, and what they noticed about each other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distensor.core import Axis, RankLayout
from distensor.training.results import ReplicaTraffic, StepResult

if TYPE_CHECKING:
    from distensor.training.replies import Reply, StepReply

logger = logging.getLogger(__name__)

GRADIENT_BYTES = 4
"""Of an element, as all-reduces here send it."""


class ReplicaWatch:
    """Keeps the counters of the step before, and says each thing about a replica once.

    Args:
        elements: of the trainable weights of each rank.
    """

    def __init__(self, layout: RankLayout, elements: Sequence[int]) -> None:
        self._elements = elements
        self._replica_of = [layout.coordinates(rank).dp for rank in range(len(elements))]
        self._members = [len(layout.group_of(rank, Axis.DP)) for rank in range(len(elements))]
        self._sent: dict[tuple[int, int], int] = {}
        self._said: set[tuple[str, tuple[int, ...]]] = set()

    def complete(self, result: StepResult, replies: Sequence[Reply], answers: Sequence[StepReply]) -> StepResult:
        """The result with what is known of the replicas, from the answers of all ranks."""
        noticed = [answer.noticed for answer in answers]
        dropped = sorted({replica for each in noticed for replica in each.dropped})
        clipped = sorted({replica for each in noticed for replica in each.clipped})
        copies = sorted({pair for each in noticed for pair in each.copies})
        names = {self._replica_of[reply.rank]: reply.who for reply in reversed(replies)}
        for replica in dropped:
            logger.warning(
                "step %d is without replica %d (%s): its update is no finite number, or did not come",
                result.step, replica, names.get(replica, "unknown"),
            )  # fmt: skip
        for (replica,) in self._new("clipped", ((replica,) for replica in clipped)):
            logger.warning(
                "step %d: the update of replica %d (%s) is much larger than those of most; it was scaled down",
                result.step, replica, names.get(replica, "unknown"),
            )  # fmt: skip
        for one, other in self._new("copies", copies):
            logger.warning(
                "step %d: replicas %d (%s) and %d (%s) sent the same entries: one copies the other, or both see the "
                "same data",
                result.step, one, names.get(one, "unknown"), other, names.get(other, "unknown"),
            )  # fmt: skip
        return replace(
            result,
            replicas=self._traffic(replies, answers),
            dropped=tuple(dropped),
            clipped=tuple(clipped),
            copies=tuple(copies),
        )

    def _new(self, what: str, found: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        fresh = [item for item in found if (what, item) not in self._said]
        self._said.update((what, item) for item in fresh)
        return fresh

    def _traffic(self, replies: Sequence[Reply], answers: Sequence[StepReply]) -> ReplicaTraffic | None:
        up: Counter[int] = Counter()
        down: Counter[int] = Counter()
        now: dict[tuple[int, int], int] = {}
        for reply, answer in zip(replies, answers, strict=True):
            for link in answer.links:
                if link.peer >= len(self._elements):  # an aggregator, which tells nothing itself
                    now[reply.rank, link.peer], now[link.peer, reply.rank] = link.sent, link.received
                elif link.peer >= 0 and self._are_apart(reply.rank, link.peer):
                    now[reply.rank, link.peer] = link.sent
        for (rank, peer), sent in now.items():
            before = self._sent.get((rank, peer), 0)
            moved = sent - before if sent >= before else sent  # a new connection counts from zero
            up[rank] += moved
            down[peer] += moved
        self._sent = now
        ranks = [rank for rank in up if rank < len(self._elements)]
        if not ranks:
            return None
        busiest = max(ranks, key=lambda rank: (up[rank], -rank))
        dense, members = GRADIENT_BYTES * self._elements[busiest], self._members[busiest]
        return ReplicaTraffic(
            up=up[busiest], down=down[busiest], dense=dense, ring=2 * (members - 1) * dense // members
        )

    def _are_apart(self, rank: int, peer: int) -> bool:
        return self._replica_of[rank] != self._replica_of[peer]
