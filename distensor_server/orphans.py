"""Workers that outlived a former supervisor: known by a mark in their environment, ended before anything starts."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from distensor_server.environment import MARK_VARIABLE
from distensor_server.statedir import read_json, remove, write_json

START_TOLERANCE = 2.0
"""Seconds: start times of processes are computed from the boot time, which moves when the clock is set."""
END_WITHIN = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    pid: int
    started: float


class WorkerRegistry:
    """A file that says which processes are ours. It is removed when the supervisor ends in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._workers: dict[int, Recorded] = {}
        self.mark = secrets.token_hex(16)

    def begin(self) -> None:
        """From now on, marked processes may exist."""
        self._save()

    def add(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._workers[pid] = Recorded(pid=pid, started=psutil.Process(pid).create_time())
            self._save()

    def discard(self, pid: int) -> None:
        if self._workers.pop(pid, None) is not None:
            self._save()

    def end(self) -> None:
        remove(self._path)

    def _save(self) -> None:
        workers = [{"pid": item.pid, "started": item.started} for item in self._workers.values()]
        # No process survives a power cut.
        write_json(self._path, {"v": 1, "mark": self.mark, "workers": workers}, outlives_power=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Orphans:
    """What was found of a former life."""

    ended: int = 0
    stuck: tuple[int, ...] = ()
    """Process ids that stayed after SIGKILL: they sit in a driver."""


def end_orphans(path: Path) -> Orphans:
    """End the processes that the file at `path` speaks of, whatever they ignore, and wait until they are gone."""
    left = read_json(path)
    if left is None:
        return Orphans()
    mark = left.get("mark")
    recorded = _recorded(left.get("workers"))
    found = list(_living(mark if isinstance(mark, str) and len(mark) == 32 else None, recorded))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    gone, alive = psutil.wait_procs(found, timeout=END_WITHIN)
    remove(path)
    return Orphans(ended=len(gone), stuck=tuple(process.pid for process in alive))


def _recorded(workers: object) -> dict[int, float]:
    if not isinstance(workers, list):
        return {}
    return {
        item["pid"]: item["started"]
        for item in workers
        if isinstance(item, dict) and isinstance(item.get("pid"), int) and isinstance(item.get("started"), float)
    }


def _living(mark: str | None, recorded: dict[int, float]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if _carries(process, mark) or _is_recorded(process, recorded):
                yield process


def _carries(process: psutil.Process, mark: str | None) -> bool:
    try:
        return mark is not None and process.environ().get(MARK_VARIABLE) == mark
    except (psutil.AccessDenied, OSError):
        # Another user's process, or a system process of macOS: not ours.
        return False


def _is_recorded(process: psutil.Process, recorded: dict[int, float]) -> bool:
    started = recorded.get(process.pid)
    return started is not None and abs(process.create_time() - started) < START_TOLERANCE
