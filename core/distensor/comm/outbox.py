"""What a node still has to tell its hub. Pure: no socket, no clock."""

from __future__ import annotations

from collections.abc import Collection

from distensor.comm.messages import Claims, JobRef
from distensor.core.control import Unit, UnitKey, WorkerChange, WorkerReady, WorkerState
from distensor.core.ids import Epoch, JobId

_NOT_LISTENING = frozenset({WorkerState.STARTING, WorkerState.EXITED, WorkerState.BACKOFF, WorkerState.BROKEN})


def ref_of(report: WorkerReady | WorkerChange) -> JobRef:
    return report.job_id, report.epoch, report.rank


class ReportBoard:
    """The latest news of each worker, so that a hub which missed or forgot some can be told again."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: dict[tuple[JobRef, type], WorkerReady | WorkerChange] = {}

    def put(self, report: WorkerReady | WorkerChange) -> None:
        ref = ref_of(report)
        self._latest.pop((ref, type(report)), None)
        if isinstance(report, WorkerChange) and report.state in _NOT_LISTENING:
            self._latest.pop((ref, WorkerReady), None)  # the port it listened on is gone
        self._latest[ref, type(report)] = report

    def release(self, job_id: JobId, epoch: Epoch) -> None:
        """Forget the membership: nobody will ask for it again."""
        for key in [key for key in self._latest if key[0][:2] == (job_id, epoch)]:
            del self._latest[key]

    def all(self) -> list[WorkerReady | WorkerChange]:
        """Everything to say after a reconnect, in the order in which it happened."""
        return list(self._latest.values())


class ClaimBook:
    """Claims that no `ClaimsAnswer` has covered yet. One batch is on its way at a time."""

    __slots__ = ("_batch", "_in_flight", "_largest", "_units")

    def __init__(self, *, largest: int) -> None:
        self._units: dict[UnitKey, Unit] = {}
        self._in_flight: Collection[UnitKey] = ()
        self._batch = 0
        self._largest = largest

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit) -> None:
        self._units.setdefault(unit.key, unit)

    def next_batch(self) -> Claims | None:
        """The oldest claims as a new batch; None while one is on its way or nothing is left."""
        if self._in_flight or not self._units:
            return None
        units = tuple(unit for _, unit in zip(range(self._largest), self._units.values(), strict=False))
        self._in_flight = [unit.key for unit in units]
        self._batch += 1
        return Claims(batch=self._batch, units=units)

    def answered(self, batch: int) -> None:
        """The hub has the batch in its books. Answers to older batches change nothing."""
        if batch != self._batch:
            return
        for key in self._in_flight:
            self._units.pop(key, None)
        self._in_flight = ()

    def connection_lost(self) -> None:
        """The batch on its way may or may not have arrived; it will be sent again."""
        self._in_flight = ()
