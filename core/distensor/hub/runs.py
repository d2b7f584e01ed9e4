"""How the runs go that trainers tell of: the newest steps of each, in memory, and who watches them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from distensor.core.ids import Epoch, JobId
from distensor.core.progress import StepProgress

MOST_STEPS_KEPT = 2000
"""Of one run: the older ones are forgotten first."""
MOST_RUNS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A step as it was told. `number` counts those of this run, from 1; `at` is the hub's clock (Unix seconds)."""

    number: int
    at: float
    epoch: Epoch
    progress: StepProgress


@dataclass(slots=True)
class _Run:
    told: int = 0
    steps: deque[RunStep] = field(default_factory=lambda: deque(maxlen=MOST_STEPS_KEPT))
    watchers: set[asyncio.Event] = field(default_factory=set)


class Runs:
    """Used in one event loop. A hub that is started again has forgotten all of it."""

    def __init__(self) -> None:
        self._runs: OrderedDict[JobId, _Run] = OrderedDict()

    def tell(self, job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress], at: float) -> None:
        run = self._run(job_id)
        newest = run.steps[-1].progress.step if run.steps else -1
        for one in steps:
            same = run.steps and run.steps[-1].epoch == epoch
            if same and one.step <= newest:
                continue  # sent again because the answer was lost
            run.told += 1
            run.steps.append(RunStep(number=run.told, at=at, epoch=epoch, progress=one))
            newest = one.step
        self.wake(job_id)

    def steps(self, job_id: JobId, after: int = 0) -> tuple[RunStep, ...]:
        """What is known of a run behind number `after`, the oldest first."""
        run = self._runs.get(job_id)
        return () if run is None else tuple(one for one in run.steps if one.number > after)

    def newest(self, job_id: JobId) -> RunStep | None:
        run = self._runs.get(job_id)
        return run.steps[-1] if run is not None and run.steps else None

    def wake(self, job_id: JobId) -> None:
        """Something about the run or its job is new."""
        if run := self._runs.get(job_id):
            for watcher in run.watchers:
                watcher.set()

    def wake_all(self) -> None:
        """The hub is ending."""
        for job_id in self._runs:
            self.wake(job_id)

    @contextmanager
    def watching(self, job_id: JobId) -> Iterator[asyncio.Event]:
        """An event that is set whenever there is something new."""
        woken, run = asyncio.Event(), self._run(job_id)
        run.watchers.add(woken)
        try:
            yield woken
        finally:
            run.watchers.discard(woken)

    def _run(self, job_id: JobId) -> _Run:
        run = self._runs.setdefault(job_id, _Run())
        self._runs.move_to_end(job_id)
        while len(self._runs) > MOST_RUNS:
            oldest = next((one for one, known in self._runs.items() if not known.watchers), None)
            if oldest is None or oldest == job_id:
                break
            del self._runs[oldest]
        return run
