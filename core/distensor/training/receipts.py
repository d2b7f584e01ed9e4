"""The trainer's receipts for finished units: sent in batches, kept until the hub has committed them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from distensor.core import Clock, Epoch, JobId
from distensor.core.control import Unit
from distensor.core.errors import AuthenticationError, ControlError, HubUnreachableError
from distensor.core.progress import MOST_STEPS, StepProgress

FLUSH_SECONDS = 0.5
MAX_UNITS_A_CALL = 2000


class ReceiptTaker(Protocol):
    def report_units(self, units: Sequence[Unit]) -> None: ...

    def report_progress(self, job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress]) -> None: ...

    def object_to(self, units: Sequence[Unit]) -> None: ...


class ReceiptSender:
    """Sends from a thread of its own, so that a hub that is away never delays a step.

    Repeating a receipt is harmless: the hub credits a unit once. Progress goes along: what a hub that is away does not
    hear of it is told later or, where it is more than one message holds, never.
    """

    def __init__(self, hub: ReceiptTaker, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._pending: list[Unit] = []
        self._progress: deque[tuple[JobId, Epoch, StepProgress]] = deque(maxlen=MOST_STEPS)
        self._different: list[Unit] = []
        self._newest = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._refused = False
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    def add(self, units: Sequence[Unit]) -> None:
        with self._lock:
            self._pending.extend(units)
            self._newest = max((unit.key.step for unit in units), default=self._newest)

    def note(self, job_id: JobId, epoch: Epoch, step: StepProgress) -> None:
        """Something for people who look at the run."""
        with self._lock:
            self._progress.append((job_id, epoch, step))

    def object_to(self, unit: Unit) -> None:
        """Others computed something else than who did this unit; sent once the hub has the receipts before it."""
        with self._lock:
            self._different.append(unit)

    @property
    def pending(self) -> int:
        with self._lock:
            return len(self._pending)

    @property
    def _objecting(self) -> bool:
        with self._lock:
            return bool(self._different)

    @property
    def paid(self) -> int:
        """The hub has the receipts of all steps up to this one."""
        with self._lock:
            return min((unit.key.step for unit in self._pending), default=self._newest + 1) - 1

    def close(self, timeout: float) -> int:
        """Try to send what is left within `timeout` seconds; returns how many units the hub has not taken."""
        self._deadline = self._clock.monotonic() + timeout
        self._closing.set()
        self._thread.join()
        return self.pending

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()
            self._tell()
        while (self.pending or self._objecting) and not self._refused and self._clock.monotonic() < self._deadline:
            if not self._flush():
                self._clock.sleep(FLUSH_SECONDS)
        if self._clock.monotonic() < self._deadline:
            self._tell()

    def _flush(self) -> bool:
        """Send one batch; False when the hub did not take it, in which case it stays."""
        with self._lock:
            batch = self._pending[:MAX_UNITS_A_CALL]
            # Only of units that the hub has heard of: all receipts that there are go first, in this flush.
            all_of_them = len(batch) == len(self._pending)
            different = self._different[:MAX_UNITS_A_CALL] if all_of_them else []
        if not batch and not different:
            return True
        if self._refused:
            return False
        try:
            if batch:
                self._hub.report_units(batch)
                with self._lock:
                    del self._pending[: len(batch)]
            if different:
                self._hub.object_to(different)
                with self._lock:
                    del self._different[: len(different)]
        except AuthenticationError:
            self._refused = True
            return False
        except ControlError:
            return False
        return True

    def _tell(self) -> None:
        """Once: a hub that is away hears it the next time, one that refuses it never does."""
        with self._lock:
            told = list(self._progress)
        for job_id, epoch in dict.fromkeys(one[:2] for one in told):
            steps = [step for *where, step in told if where == [job_id, epoch]]
            try:
                self._hub.report_progress(job_id, epoch, steps)
            except HubUnreachableError:
                return
            except ControlError:
                pass  # an older hub, or a job that it has forgotten
        with self._lock:
            for one in told:
                if self._progress and self._progress[0] == one:
                    self._progress.popleft()
