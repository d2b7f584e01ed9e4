"""What is broken: each fault has its code, cause, fix and log, and nothing else is one."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import Any

import pytest
from test_server_sections import CONNECTED, CPU, NO_CPU, OFFLINE, REJECTED, WEDGED, S, picture, worker

from distensor.comm import LinkError, LinkState
from distensor.core.errors import StoreError
from distensor_server.devices.model import lost
from distensor_server.exits import ExitCause
from distensor_server.faults import Fault, Part, faults
from distensor_server.journal import WRITTEN_WITHIN, Journal
from distensor_server.metrics import exposition
from distensor_server.picture import Unwritten, WorkerView
from distensor_server.sections import build_sections


def only(**given: Any) -> Fault:
    (found,) = faults(picture(**given))
    return found


def failed(state: S, failures: int, cause: ExitCause | None = None, **more: Any) -> WorkerView:
    view = worker(state, last_exit="killed by signal 9 (SIGKILL)", **more)
    return replace(view, life=replace(view.life, failures=failures, cause=cause))


def test_nothing_is_broken_on_a_machine_that_waits() -> None:
    """Closed gates, an owner's choice, a hub that is being called, workers that end as they should."""
    connecting = replace(CONNECTED, state=LinkState.CONNECTING, error=OFFLINE.error)
    no_key = replace(OFFLINE, error=LinkError(code="no_key", message="no key yet", fix="distensor auth login"))
    ended = failed(S.EXITED, 1)
    for given in ({}, {"devices": (NO_CPU,)}, {"link": connecting}, {"link": no_key}, {"workers": (ended, worker())}):
        assert faults(picture(**given)) == []


@pytest.mark.parametrize("link", [OFFLINE, REJECTED])
def test_a_hub_that_is_away_or_refuses(link: Any) -> None:
    found = only(link=link)
    assert (found.part, found.code, found.cause, found.fix) == (
        Part.HUB,
        "unreachable",
        "no hub answers",
        "check the address",
    )
    assert (found.since, found.retry_at, found.log) == (5.0, 50.0, "distensor logs")


def test_a_device_that_went_and_one_that_never_worked() -> None:
    gone = only(devices=(lost(CPU, "NVML error 15: it fell off the bus"),))
    assert (gone.code, gone.subject, gone.cause) == ("device_lost", "cpu", "NVML error 15: it fell off the bus")
    assert "used again as soon as it answers" in gone.fix
    never = only(devices=(replace(WEDGED, blocked="NVML error 999"),))
    assert (never.code, never.subject) == ("device_unusable", "cuda")
    assert "distensor doctor" in never.fix


@pytest.mark.parametrize(
    ("state", "failures", "cause", "code", "words"),
    [
        (S.BROKEN, 5, None, "crash_loop", "(b in the dashboard) starts it again"),
        (S.BROKEN, 5, ExitCause.OUT_OF_MEMORY, "crash_loop", "needs more memory than it gets"),
        (S.BROKEN, 5, ExitCause.PEER_LOST, "crash_loop", "the other end"),
        (S.BACKOFF, 1, ExitCause.SIGNAL, "restarting", "nothing to do"),
    ],
)
def test_a_worker_that_fails(state: S, failures: int, cause: ExitCause | None, code: str, words: str) -> None:
    view = failed(state, failures, cause, retry_at=70.0 if state is S.BACKOFF else None)
    found = only(workers=(view,))
    assert (found.part, found.subject, found.code) == (Part.WORKER, view.worker_id, code)
    times = ", 5 times in a row" if failures > 1 else ""
    assert found.cause.endswith(f": killed by signal 9 (SIGKILL){times}")
    assert words in found.fix
    assert found.log == f"distensor logs --worker {view.worker_id}"


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, "disk_full", "free some space"),
        (errno.EDQUOT, "disk_full", "free some space"),
        (errno.EACCES, "not_written", "let this user write there"),
        (None, "not_written", "let this user write there"),
    ],
)
def test_a_file_that_cannot_be_written(number: int | None, code: str, words: str) -> None:
    found = only(unwritten=Unwritten(at=3.0, text="cannot write x", errno=number))
    assert (found.part, found.code, found.cause, found.since) == (Part.DISK, code, "cannot write x", 3.0)
    assert words in found.fix


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.moment = 100.0

    def now(self) -> float:
        return self.moment

    monotonic = now


def test_a_failed_write_is_told_while_it_is_recent() -> None:
    clock: Any = Clock()
    journal = Journal(clock, lambda _event: None)

    def write() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StoreError("cannot write hold.json") from error

    assert journal.guarded(lambda: None)
    assert journal.unwritten is None
    assert not journal.guarded(write)
    clock.moment += WRITTEN_WITHIN - 1
    assert journal.unwritten == Unwritten(at=100.0, text="cannot write hold.json", errno=errno.ENOSPC)
    clock.moment += 1
    assert journal.unwritten is None


def test_they_are_a_section_and_a_metric() -> None:
    given = picture(link=REJECTED, devices=(CPU, replace(WEDGED, blocked="x")), workers=(failed(S.BROKEN, 5),))
    sections = build_sections(given, 0.0)
    assert [fault["code"] for fault in sections["faults"]] == ["unreachable", "device_unusable", "crash_loop"]
    page = exposition(sections)
    assert 'distensor_fault{part="hub",subject="",code="unreachable"} 1' in page
    assert 'distensor_fault{part="device",subject="cuda",code="device_unusable"} 1' in page
