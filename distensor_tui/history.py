"""What the dashboard remembers of the snapshots it saw: short series for sparklines and for the time left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distensor_tui.model import Job, Snapshot

KEPT = 400
RATE_WINDOW_S = 60.0
ENOUGH_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTrace:
    """The steps of one job: when each was seen and with which loss. Speeds are tokens per second."""

    steps: tuple[tuple[float, int], ...] = ()
    losses: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()
    step_begins: tuple[int, int] = (0, 0)
    """How many losses and speeds there were before the present step: what comes later in it takes their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    jobs: Mapping[str, JobTrace] = field(default_factory=dict)

    def losses(self, job_id: str) -> tuple[float, ...]:
        trace = self.jobs.get(job_id)
        return trace.losses if trace else ()

    def speeds(self, job_id: str) -> tuple[float, ...]:
        trace = self.jobs.get(job_id)
        return trace.speeds if trace else ()

    def seconds_left(self, job: Job) -> float | None:
        """Steps still to do over the step rate of the last minute."""
        pace = self.steps_per_second(job.id)
        if pace is None or job.step is None or job.total_steps is None:
            return None
        return max(0, job.total_steps - job.step) / pace

    def steps_per_second(self, job_id: str) -> float | None:
        trace = self.jobs.get(job_id)
        if trace is None or len(trace.steps) < 2:
            return None
        last_at, last_step = trace.steps[-1]
        first_at, first_step = next(s for s in trace.steps if s[0] >= last_at - RATE_WINDOW_S)
        if last_at - first_at < ENOUGH_S or last_step <= first_step:
            return None
        return (last_step - first_step) / (last_at - first_at)


def remember(history: History, snapshot: Snapshot, at: float) -> History:
    """Add what is new in this snapshot; jobs that are gone are forgotten."""
    traces = {job.id: _extend(history.jobs.get(job.id, JobTrace()), job, at) for job in snapshot.jobs or ()}
    unchanged = traces.keys() == history.jobs.keys() and all(history.jobs[k] is v for k, v in traces.items())
    return history if unchanged else replace(history, jobs=traces)


def _extend(trace: JobTrace, job: Job, at: float) -> JobTrace:
    if job.step is None:
        return trace
    last = trace.steps[-1][1] if trace.steps else None
    if job.step == last:
        return _corrected(trace, job)
    if last is not None and job.step < last:
        trace = JobTrace()
    losses, speeds = trace.losses[1 - KEPT :], trace.speeds[1 - KEPT :]
    begun = JobTrace(
        steps=(*trace.steps, (at, job.step))[-KEPT:],
        losses=losses,
        speeds=speeds,
        step_begins=(len(losses), len(speeds)),
    )
    return _corrected(begun, job)


def _corrected(trace: JobTrace, job: Job) -> JobTrace:
    """A worker that reports its step later may bring another loss and speed: what is shown as now ends the curves."""
    losses, speeds = trace.step_begins
    seen = replace(
        trace,
        losses=_ending(trace.losses, losses, job.loss),
        speeds=_ending(trace.speeds, speeds, job.tokens_per_second),
    )
    return trace if seen == trace else seen


def _ending(series: tuple[float, ...], begin: int, value: float | None) -> tuple[float, ...]:
    return series if value is None else (*series[:begin], value)
