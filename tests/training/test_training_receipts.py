"""Receipts reach the hub, whatever it does in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from distensor.core import SYSTEM_CLOCK, Epoch, JobId, Rank
from distensor.core.control import Unit, UnitKey
from distensor.core.errors import AuthenticationError, HubUnreachableError
from distensor.core.progress import MOST_STEPS, StepProgress
from distensor.training.receipts import ReceiptSender


def unit(step: int) -> Unit:
    return Unit(key=UnitKey(job_id=JobId("j"), epoch=Epoch(1), step=step, rank=Rank(0)), micro_batches=1)


class Hub:
    """Takes receipts, after being away for the first `away` calls."""

    def __init__(self, away: int = 0, refuses: bool = False) -> None:
        self.away = away
        self.refuses = refuses
        self.calls = 0
        self.taken: list[Unit] = []
        self.told: list[tuple[JobId, Epoch, int]] = []
        self.different: list[Unit] = []
        self.called, self.heard, self.objected = threading.Event(), threading.Event(), threading.Event()

    def report_units(self, units: Sequence[Unit]) -> None:
        self.calls += 1
        self.called.set()
        if self.refuses:
            raise AuthenticationError("token revoked")
        if self.away > 0:
            self.away -= 1
            raise HubUnreachableError("away")
        self.taken.extend(units)

    def report_progress(self, job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress]) -> None:
        if self.refuses:
            raise AuthenticationError("token revoked")
        if self.away > 0:
            self.away -= 1
            raise HubUnreachableError("away")
        self.told += [(job_id, epoch, one.step) for one in steps]
        self.heard.set()

    def object_to(self, units: Sequence[Unit]) -> None:
        assert self.taken, "the receipts come first"
        self.report_units([])
        self.different.extend(units)
        self.objected.set()


def test_all_receipts_arrive_once_and_in_order() -> None:
    hub = Hub()
    sender = ReceiptSender(hub, SYSTEM_CLOCK)
    for step in range(5000):
        sender.add([unit(step)])
    assert sender.close(timeout=20) == 0
    assert [item.key.step for item in hub.taken] == list(range(5000))


def test_a_hub_that_is_away_gets_them_when_it_is_back() -> None:
    hub = Hub(away=2)
    sender = ReceiptSender(hub, SYSTEM_CLOCK)
    sender.add([unit(1), unit(2)])
    assert sender.close(timeout=20) == 0
    assert len(hub.taken) == 2


def test_an_objection_comes_after_the_receipts_and_is_not_lost_while_the_hub_is_away() -> None:
    hub = Hub(away=2)
    sender = ReceiptSender(hub, SYSTEM_CLOCK)
    sender.object_to(unit(1))
    sender.add([unit(1), unit(2)])
    assert sender.close(timeout=20) == 0
    assert (hub.taken, hub.different) == ([unit(1), unit(2)], [unit(1)])


class BusyHub(Hub):
    """While it takes receipts, there are more already, as of a job of short steps."""

    sender: ReceiptSender | None = None

    def report_units(self, units: Sequence[Unit]) -> None:
        super().report_units(units)
        if self.sender is not None and not self.objected.is_set():
            self.sender.add([unit(len(self.taken) + 1)])


def test_an_objection_does_not_wait_for_the_end_of_the_receipts() -> None:
    hub = BusyHub()
    hub.sender = ReceiptSender(hub, SYSTEM_CLOCK)
    hub.sender.add([unit(1)])
    hub.sender.object_to(unit(1))
    assert hub.objected.wait(20)
    assert hub.sender.close(timeout=20) == 0
    assert hub.different == [unit(1)]


def test_a_hub_that_stays_away_does_not_keep_us_for_ever() -> None:
    sender = ReceiptSender(Hub(away=1_000_000), SYSTEM_CLOCK)
    sender.add([unit(1)])
    assert sender.close(timeout=0.2) == 1


def test_a_refused_token_is_not_tried_again_and_again() -> None:
    hub = Hub(refuses=True)
    sender = ReceiptSender(hub, SYSTEM_CLOCK)
    sender.add([unit(1)])
    assert sender.close(timeout=60) == 1
    assert not hub.taken


def test_a_refused_token_is_not_tried_while_the_job_goes_on_either() -> None:
    hub = Hub(refuses=True)
    sender = ReceiptSender(hub, SYSTEM_CLOCK)
    sender.add([unit(1)])
    assert hub.called.wait(20)
    sender.add([unit(2)])
    assert sender.close(timeout=60) == 2
    assert hub.calls == 1


def progress(step: int) -> StepProgress:
    return StepProgress(step=step, loss=1.5, tokens=8, seconds=0.25, bytes_sent=10, bytes_received=20)


def test_progress_is_told_once_by_epoch_and_in_order() -> None:
    hub = Hub(away=2)
    sender = ReceiptSender(hub, SYSTEM_CLOCK)
    for step in range(3):
        sender.note(JobId("j"), Epoch(1), progress(step))
    sender.note(JobId("j"), Epoch(2), progress(3))
    assert hub.heard.wait(20)
    assert sender.close(5) == 0
    assert hub.told == [("j", 1, 0), ("j", 1, 1), ("j", 1, 2), ("j", 2, 3)]


def test_a_hub_that_refuses_progress_is_not_asked_for_ever_and_an_absent_one_keeps_no_memory() -> None:
    refusing, absent = Hub(refuses=True), Hub(away=1_000_000)
    sender = ReceiptSender(refusing, SYSTEM_CLOCK)
    sender.note(JobId("j"), Epoch(1), progress(0))
    assert sender.close(5) == 0
    assert not sender._progress
    sender = ReceiptSender(absent, SYSTEM_CLOCK)
    for step in range(3 * MOST_STEPS):
        sender.note(JobId("j"), Epoch(1), progress(step))
    assert sender.close(0.1) == 0
    assert [one.step for *_, one in sender._progress] == list(range(2 * MOST_STEPS, 3 * MOST_STEPS))
