"""The queue of jobs that do not fit now: the higher priority comes first, then who came first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distensor.core.ids import JobId


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    priority: int
    number: int
    since: float


class Waiting:
    """Who waits, in which order."""

    def __init__(self) -> None:
        self._places: dict[JobId, _Place] = {}
        self._number = 0

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, job_id: JobId, priority: int, now: float) -> None:
        self._number += 1
        self._places[job_id] = _Place(priority=priority, number=self._number, since=now)

    def remove(self, job_id: JobId) -> None:
        self._places.pop(job_id, None)

    def in_order(self) -> list[JobId]:
        return sorted(self._places, key=lambda job_id: (-self._places[job_id].priority, self._places[job_id].number))

    def seconds(self, job_id: JobId, now: float) -> float:
        """How long the job has waited."""
        return now - self._places[job_id].since
