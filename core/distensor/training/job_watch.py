"""What the hub tells a trainer of its job, followed in a thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from distensor.core import Clock, Epoch, JobId, ParallelConfig
from distensor.core.control import JobState, JobUpdate, Reconfiguration, TakeOver
from distensor.core.errors import DistensorError, HubProtocolError, JobFailedError, PlacementError


class JobHub(Protocol):
    """What a job asks of the hub's client."""

    def reconfigure_job(self, change: Reconfiguration) -> Epoch: ...

    def watch_job(self, job_id: JobId) -> Iterator[JobUpdate]: ...

    def take_over_job(self, taken: TakeOver) -> tuple[Epoch, ParallelConfig]: ...

    def end_job(self, job_id: JobId, state: JobState, reason: str = "", epoch: Epoch | None = None) -> None: ...


class JobWatch:
    """Follows a job's updates in a thread; others wait on what they need."""

    def __init__(self, client: JobHub, job_id: JobId, clock: Clock) -> None:
        self._client = client
        self._job_id = job_id
        self._clock = clock
        self._changed = threading.Condition()
        self._latest: JobUpdate | None = None
        self._error: DistensorError | None = None
        self._over = False
        self._thread = threading.Thread(target=self._follow, name=f"watch-{job_id}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for update in self._client.watch_job(self._job_id):
                with self._changed:
                    self._latest = update
                    self._changed.notify_all()
        except DistensorError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a bug must be raised where somebody waits, not in this thread
            self._error = HubProtocolError(f"following job {self._job_id} failed: {error!r}")
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_for(self, wanted: Callable[[JobUpdate], bool], timeout: float) -> JobUpdate | None:
        """The first update, the present one included, for which `wanted` holds; None at the end of the time.

        Raises:
            DistensorError: the hub refused the watch.
        """
        deadline = self._clock.monotonic() + timeout
        with self._changed:
            while True:
                if self._latest is not None and wanted(self._latest):
                    return self._latest
                if self._error is not None:
                    raise self._error
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0 or self._over:
                    return None
                self._changed.wait(min(remaining, 0.5))

    @property
    def over(self) -> bool:
        """Nothing more will come: the job has ended, or the client was closed."""
        with self._changed:
            return self._over

    @property
    def latest(self) -> JobUpdate | None:
        with self._changed:
            return self._latest


def wait_until_running(watch: JobWatch, job_id: JobId, timeout: float) -> JobUpdate:
    """The update with the topology. `timeout` (seconds) begins once the job has left the hub's queue.

    Raises:
        PlacementError: not all workers got ready in time.
        JobFailedError: the job has ended, or the hub says nothing more of it.
    """
    first = watch.wait_for(lambda _: True, timeout)
    if first is not None and first.state is JobState.QUEUED:
        watch.wait_for(lambda seen: seen.state is not JobState.QUEUED, math.inf)
    update = watch.wait_for(lambda seen: seen.state is not JobState.PLACED, timeout)
    if update is None and watch.over:
        raise JobFailedError(f"job {job_id}: the hub says nothing more of it; the session may have been closed")
    if update is None:
        waiting = watch.latest
        states = "" if waiting is None else ", ".join(f"rank {c.rank} {c.state.value}" for c in waiting.workers)
        raise PlacementError(
            f"job {job_id}: not all workers were ready after {timeout:.0f} s ({states or 'none has said anything'}); "
            "look at the dashboard of the nodes"
        )
    if update.state is not JobState.RUNNING or update.topology is None or update.certificate is None:
        raise JobFailedError(f"job {job_id} is {update.state.value}: {update.reason or 'no reason given'}")
    return update
