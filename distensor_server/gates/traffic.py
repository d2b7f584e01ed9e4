"""Bytes of all workers by local day and month, kept across restarts.

What a worker moves between its last report and its end, half a second at most, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distensor_server.picture import WorkerView
from distensor_server.statedir import read_json, write_json

SAVE_SECONDS = 10.0


class Traffic:
    """`count` is called with the workers of each moment; `day` and `month` are the sums of the present ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[tuple[str, int], tuple[int | None, int, int]] = {}
        self._date = ""
        self.day = 0
        self.month = 0
        self._saved_at = float("-inf")
        self._dirty = False

    def load(self, date: str) -> None:
        """`date` is today's, as 2026-12-01. What a broken file said is lost, not the start."""
        stored = read_json(self._path) or {}
        kept, day, month = stored.get("date"), stored.get("day_bytes"), stored.get("month_bytes")
        if isinstance(kept, str) and _is_count(day) and _is_count(month):
            self._date, self.day, self.month = kept, int(day or 0), int(month or 0)
        self._turn(date)

    def count(self, workers: Sequence[WorkerView], date: str) -> None:
        """Add what was moved since the last time; `workers` are all that are known."""
        self._turn(date)
        known = {worker.worker_id for worker in workers}
        self._seen = {ref: value for ref, value in self._seen.items() if ref[0] in known}
        moved = sum(self._moved(worker) for worker in workers)
        if moved:
            self.day += moved
            self.month += moved
            self._dirty = True

    def _moved(self, worker: WorkerView) -> int:
        """An ended process has no id any more and keeps its last counters; a new id begins at 0."""
        moved = 0
        for link in worker.links:
            ref = (worker.worker_id, link.peer)
            pid, sent, received = self._seen.get(ref, (worker.pid, 0, 0))
            if worker.pid not in (None, pid) or link.sent < sent or link.received < received:
                sent = received = 0
            moved += link.sent - sent + link.received - received
            self._seen[ref] = (worker.pid or pid, link.sent, link.received)
        return moved

    def _turn(self, date: str) -> None:
        """A new day begins at 0, and so does a new month. A clock that was set back begins no new one."""
        if date <= self._date:
            return
        self.day = 0
        if date[:7] != self._date[:7]:
            self.month = 0
        self._date = date
        self._dirty = True

    def save(self, now: float, *, at_once: bool = False) -> None:
        """At most every ten seconds; `now` is monotonic.

        Raises:
            StoreError: it cannot be written.
        """
        if self._dirty and (at_once or now - self._saved_at >= SAVE_SECONDS):
            self._saved_at, self._dirty = now, False
            write_json(self._path, {"v": 1, "date": self._date, "day_bytes": self.day, "month_bytes": self.month})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
