"""Who meets whom at a relay, and how much each job may use of it. Pure: no socket, no clock."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distensor.comm.relay_words import Place
from distensor.core.errors import ConfigError
from distensor.core.ids import JobId

C = TypeVar("C")

MOST_PARKED = 16
"""Connections of one member that wait to be dialed; with one more, the oldest goes."""
MOST_JOBS = 10_000
"""Jobs whose bytes are remembered; beyond it those of the one heard of longest ago are forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """`connections`: at once, in all, and `job_connections` of one job. `job_bytes`: that one job may have forwarded,
    both ways together. `rate`: bytes a second of all together; None for no limit.
    """

    connections: int = 1000
    job_connections: int = 256
    job_bytes: int = 100 * 10**9
    rate: float | None = None

    def __post_init__(self) -> None:
        if min(self.connections, self.job_connections, self.job_bytes) < 1 or (
            self.rate is not None and self.rate <= 0
        ):
            raise ConfigError(f"{self}: every cap is above 0")


@dataclass(slots=True)
class Desk(Generic[C]):
    """Members that are parked, and the books of the jobs. C is a connection."""

    caps: Caps
    _parked: dict[Place, deque[C]] = field(default_factory=dict)
    _open: Counter[JobId] = field(default_factory=Counter)
    _bytes: dict[JobId, int] = field(default_factory=dict)

    def admit(self, job_id: JobId) -> str | None:
        """Count one more connection of a job, or say why not."""
        if self._open[job_id] >= self.caps.job_connections:
            return f"this job has {self.caps.job_connections} connections at this relay already"
        if self.left(job_id) <= 0:
            return f"this relay has forwarded the {self.caps.job_bytes} bytes that one job may have"
        self._open[job_id] += 1
        return None

    def dismiss(self, job_id: JobId) -> None:
        """One connection fewer."""
        self._open[job_id] -= 1
        if self._open[job_id] <= 0:
            del self._open[job_id]

    def park(self, place: Place, connection: C) -> C | None:
        """Keep a connection; returns the one that has to go for it."""
        waiting = self._parked.setdefault(place, deque())
        waiting.append(connection)
        return waiting.popleft() if len(waiting) > MOST_PARKED else None

    def unpark(self, place: Place, connection: C) -> None:
        """It went away. One that was taken already is no error."""
        waiting = self._parked.get(place)
        if waiting is not None and connection in waiting:
            waiting.remove(connection)
            if not waiting:
                del self._parked[place]

    def take(self, place: Place) -> C | None:
        """The connection that has waited there longest."""
        waiting = self._parked.get(place)
        if not waiting:
            return None
        taken = waiting.popleft()
        if not waiting:
            del self._parked[place]
        return taken

    def left(self, job_id: JobId) -> int:
        """Bytes that may still be forwarded for a job."""
        return self.caps.job_bytes - self._bytes.get(job_id, 0)

    def forwarded(self, job_id: JobId, count: int) -> None:
        known = self._bytes.pop(job_id, 0)
        self._bytes[job_id] = known + count  # at the end: the one heard of last
        while len(self._bytes) > MOST_JOBS:
            del self._bytes[next(iter(self._bytes))]

    @property
    def total(self) -> int:
        """Bytes forwarded for all remembered jobs."""
        return sum(self._bytes.values())
