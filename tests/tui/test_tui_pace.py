"""The pace of a job as the dashboard sees it: from a window, never from the step's number alone."""

from __future__ import annotations

import tui_fake as fake

from distensor_tui.history import History, remember
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
