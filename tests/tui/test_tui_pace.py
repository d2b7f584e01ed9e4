"""The pace of a job as the dashboard sees it: from a window, never from the step's number alone."""

from __future__ import annotations

import tui_fake as fake

from distensor_tui.history import KEPT, History, remember
from distensor_tui.model import Snapshot
from distensor_tui.sections import apply


def seen(history: History, step: int, at: float) -> History:
    snapshot = apply(Snapshot(), {"jobs": [fake.job(step=step, total_steps=200)]}, full=True)
    return remember(history, snapshot, at)


def test_a_resumed_job_does_not_spike_and_a_slow_step_slows_the_pace() -> None:
    """MET-03: resume from step 100, ten steps of 1 s, then one of 5 s."""
    history, at = seen(History(), 100, 1000.0), 1000.0
    assert history.steps_per_second("job-1") is None, "a hundred steps were not done in no time"
    for step in range(101, 111):
        at += 1.0
        history = seen(history, step, at)
        pace = history.steps_per_second("job-1")
        assert pace is None or abs(pace - 1.0) < 0.01
    history = seen(history, 111, at + 5.0)
    pace = history.steps_per_second("job-1")
    assert pace is not None
    assert abs(pace - 11 / 15) < 0.01
    again = seen(history, 40, at + 6.0)
    assert again.steps_per_second("job-1") is None, "a job that went back begins anew"


def test_the_curves_end_at_what_is_shown_as_now() -> None:
    """A worker that reports the same step later brings another loss and speed, or the first ones."""
    history = History()
    told = [(7, None, 10.0), (7, 3.5, None), (7, 3.25, 12.0), (8, None, None), (8, 3.0, 11.0), (9, None, 9.0)]
    for at, (step, loss, speed) in enumerate(told):
        job = fake.job(step=step, loss=loss, tokens_per_second=speed)
        history = remember(history, apply(Snapshot(), {"jobs": [job]}, full=True), float(at))
    assert history.losses("job-1") == (3.25, 3.0)
    assert history.speeds("job-1") == (12.0, 11.0, 9.0)
    again = remember(history, apply(Snapshot(), {"jobs": [job]}, full=True), 99.0)
    assert again is history, "nothing new makes no new frame"


def test_only_so_much_is_kept_of_a_long_job() -> None:
    history = History()
    for step in range(KEPT + 50):
        job = fake.job(step=step, loss=float(step))
        history = remember(history, apply(Snapshot(), {"jobs": [job]}, full=True), float(step))
    assert len(history.losses("job-1")) == KEPT
    assert history.losses("job-1")[-1] == KEPT + 49
