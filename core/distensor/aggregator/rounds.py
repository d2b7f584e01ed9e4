"""What an aggregator does in the rounds of one group: events in, deliveries out. Pure: no socket, no clock.

A round of a site closes when every member of the site that lives has contributed, or its patience is over; what comes
later is left out. A closed round goes to the aggregators of the other sites. When their rounds have come too, the set
of all is delivered to the members of the site. A member begins the next round only once all members of the group have
told each other that they have this one, so at most one round is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from distensor.aggregator.words import Hello
from distensor.core.errors import FrameError
from distensor.transport import Buffer

Contributions: TypeAlias = Mapping[int, Buffer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliver:
    """A set that is to go to a member of the site, or to another aggregator."""

    to: int
    number: int
    found: Contributions


@dataclass(slots=True)
class Rounds:
    """The rounds of one group at one aggregator. `number` is the open one."""

    hello: Hello
    number: int = 1
    _lost: set[int] = field(default_factory=set)
    _found: dict[int, Buffer] = field(default_factory=dict)
    _others: dict[int, Contributions] = field(default_factory=dict)
    _early: dict[int, Contributions] = field(default_factory=dict)
    _since: float | None = None
    _closed: bool = False

    def contribute(self, rank: int, number: int, message: Buffer, now: float) -> list[Deliver]:
        """A member's message. One of a round that is over is left out.

        Raises:
            FrameError: not a member of the site, a round that has not begun, or a second message.
        """
        if rank not in self.hello.site or number > self.number:
            raise FrameError(f"rank {rank} contributes to round {number}; open is {self.number} of {self.hello.site}")
        if number < self.number or self._closed:
            return []
        if rank in self._found:
            raise FrameError(f"rank {rank} contributes twice to round {number}")
        self._found[rank] = message
        self._since = now if self._since is None else self._since
        return self._progress()

    def site_set(self, other: int, number: int, found: Contributions) -> list[Deliver]:
        """What another site has contributed. It may be a round ahead of this one.

        Raises:
            FrameError: not an aggregator of this group, members that are ours, or another round.
        """
        if other not in self.hello.others or found.keys() & set(self.hello.site):
            raise FrameError(f"rank {other} sends the set of a site with ranks {sorted(found)[:8]}; expected others")
        if number == self.number + 1 and other not in self._early:
            self._early[other] = found
            return []
        if number != self.number or other in self._others:
            raise FrameError(f"rank {other} sends the set of round {number}; open is {self.number}")
        self._others[other] = found
        return self._progress()

    def lose(self, rank: int) -> list[Deliver]:
        """A member or an aggregator is gone: nothing is awaited of it."""
        self._lost.add(rank)
        return self._progress()

    def tick(self, now: float) -> list[Deliver]:
        """Close a round whose patience is over."""
        patience = self.hello.patience
        if self._closed or patience is None or self._since is None or now - self._since < patience:
            return []
        return self._close()

    def _progress(self) -> list[Deliver]:
        if not self._closed:
            missing = set(self.hello.site) - self._found.keys() - self._lost
            return [] if missing or not self._found else self._close()
        return self._deliver()

    def _close(self) -> list[Deliver]:
        self._closed = True
        own = dict(self._found)
        alive = [other for other in self.hello.others if other not in self._lost]
        return [Deliver(to=other, number=self.number, found=own) for other in alive] + self._deliver()

    def _deliver(self) -> list[Deliver]:
        if set(self.hello.others) - self._others.keys() - self._lost:
            return []
        whole = dict(self._found)
        for found in self._others.values():
            whole.update(found)
        members = [rank for rank in self.hello.site if rank not in self._lost]
        delivered = [Deliver(to=rank, number=self.number, found=whole) for rank in members]
        self.number += 1
        self._found, self._since, self._closed = {}, None, False
        self._others, self._early = dict(self._early), {}
        return delivered
