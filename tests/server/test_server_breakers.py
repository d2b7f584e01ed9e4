"""What is remembered of workers that failed: bounded, forgiving of torn files, and gone after a day."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distensor.core.control import WorkerState
from distensor.core.ids import Epoch, JobId, Rank
from distensor.testing.clock import FakeClock
from distensor_server.breakers import KEPT, Breakers
from distensor_server.lifecycle import Life
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.workforce import PastFailures, WorkerRef

REF: WorkerRef = (JobId("j"), Epoch(1), Rank(0))


class FakeNode:
    """As much of a node as the feature touches."""

    def __init__(self, root: Any, clock: FakeClock) -> None:
        self.clock = clock
        self.state = SimpleNamespace(root=root)
        self.workforce = SimpleNamespace(past={})
        self.journal = SimpleNamespace(guarded=lambda write: write())


def feature(root: Any, clock: FakeClock) -> tuple[Breakers, dict[WorkerRef, PastFailures]]:
    node = FakeNode(root, clock)
    made = Breakers(cast(Node, node))
    made.open()
    return made, node.workforce.past


def picture(now: float, lives: Mapping[WorkerRef, Life]) -> Picture:
    views = [
        SimpleNamespace(assignment=SimpleNamespace(job_id=job, epoch=epoch, rank=rank), life=life)
        for (job, epoch, rank), life in lives.items()
    ]
    return cast(Picture, SimpleNamespace(now=now, workers=views))


BROKEN = Life(state=WorkerState.BROKEN, failures=5, restarts=4, last_exit="out of memory")


def test_failures_are_remembered_for_a_day_and_forgotten_when_it_runs(tmp_path: Any) -> None:
    clock = FakeClock()
    first, _ = feature(tmp_path, clock)
    first.on_tick(picture(clock.now(), {REF: BROKEN}))
    assert feature(tmp_path, clock)[1] == {REF: PastFailures(failures=5, restarts=4, reason="out of memory")}
    clock.advance(86401)
    assert feature(tmp_path, clock)[1] == {}
    again, _ = feature(tmp_path, clock)
    again.on_tick(picture(clock.now(), {REF: BROKEN}))
    again.on_tick(picture(clock.now(), {REF: Life(state=WorkerState.RUNNING, restarts=5)}))
    assert feature(tmp_path, clock)[1] == {}


def test_a_worker_that_was_released_is_forgotten(tmp_path: Any) -> None:
    clock = FakeClock()
    made, _ = feature(tmp_path, clock)
    made.on_tick(picture(clock.now(), {REF: BROKEN}))
    made.on_tick(picture(clock.now(), {REF: Life(failures=5, last_exit="x", ending="released")}))
    assert feature(tmp_path, clock)[1] == {}


def test_the_file_is_bounded(tmp_path: Any) -> None:
    clock = FakeClock()
    made, _ = feature(tmp_path, clock)
    made.on_tick(picture(clock.now(), {(JobId(f"j{n}"), Epoch(1), Rank(0)): BROKEN for n in range(KEPT + 50)}))
    assert len(feature(tmp_path, clock)[1]) == KEPT


GOOD = {"job": "j", "epoch": 1, "rank": 0, "failures": 2, "restarts": 1, "reason": "x", "at": 1_700_000_000}


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"workers": 5},
        {"workers": [5, None, {}]},
        {"workers": [{**GOOD, "failures": "x"}]},
        {"workers": [{**GOOD, "failures": 0}]},
    ],
)
def test_a_damaged_file_says_nothing(tmp_path: Any, stored: Any) -> None:
    (tmp_path / "breakers.json").write_text(json.dumps(stored))
    assert feature(tmp_path, FakeClock())[1] == {}
