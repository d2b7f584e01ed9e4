"""Failures in a row, kept across restarts: a crash loop that broke stays broken when only the supervisor came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor.core.ids import Epoch, JobId, Rank
from distensor_server.feature import Feature
from distensor_server.node import Node
from distensor_server.picture import Picture, WorkerView
from distensor_server.statedir import read_json, write_json
from distensor_server.workforce import PastFailures, WorkerRef

KEPT_SECONDS = 86400.0
KEPT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    past: PastFailures
    at: float


class Breakers(Feature):
    """Hands the workforce what it remembers, and writes down what is new every two seconds."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._path: Path = node.state.root / "breakers.json"
        self._entries: dict[WorkerRef, _Entry] = {}

    def open(self) -> None:
        self._entries = _parse(read_json(self._path) or {}, self._node.clock.now())
        self._node.workforce.past.update({ref: entry.past for ref, entry in self._entries.items()})

    def on_tick(self, picture: Picture) -> None:
        known = dict(self._entries)
        for view in picture.workers:
            assignment = view.assignment
            ref = (assignment.job_id, assignment.epoch, assignment.rank)
            past = _past_of(view)
            if past is None:
                known.pop(ref, None)
            elif ref not in known or known[ref].past != past:
                known[ref] = _Entry(past=past, at=picture.now)
        if known != self._entries:
            self._entries = known
            self._node.journal.guarded(lambda: write_json(self._path, _json(known)))


def _past_of(view: WorkerView) -> PastFailures | None:
    life = view.life
    if not life.failures or life.ending:
        return None
    return PastFailures(failures=life.failures, restarts=life.restarts, reason=life.last_exit)


def _json(entries: Mapping[WorkerRef, _Entry]) -> dict[str, Any]:
    newest = sorted(entries.items(), key=lambda item: item[1].at)[-KEPT:]
    rows = [
        {
            "job": job,
            "epoch": epoch,
            "rank": rank,
            "failures": entry.past.failures,
            "restarts": entry.past.restarts,
            "reason": entry.past.reason,
            "at": round(entry.at),
        }
        for (job, epoch, rank), entry in newest
    ]
    return {"v": 1, "workers": rows}


def _parse(stored: Mapping[str, Any], now: float) -> dict[WorkerRef, _Entry]:
    """What is torn, strange or old is left out."""
    rows = stored.get("workers")
    found: dict[WorkerRef, _Entry] = {}
    for row in rows if isinstance(rows, list) else []:
        try:
            ref = (JobId(str(row["job"])), Epoch(int(row["epoch"])), Rank(int(row["rank"])))
            past = PastFailures(failures=int(row["failures"]), restarts=int(row["restarts"]), reason=str(row["reason"]))
            at = float(row["at"])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if abs(now - at) < KEPT_SECONDS and past.failures > 0:
            found[ref] = _Entry(past=past, at=at)
    return found
