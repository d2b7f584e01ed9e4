"""The error state of each panel: code, cause, fix, log, for what is really broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tui_fake as fake
from test_tui_screens import VIEWS, live, on, scene, text

from distensor_tui import plain
from distensor_tui.model import Snapshot
from distensor_tui.orders import pause_text
from distensor_tui.scene import Screen
from distensor_tui.screens.table import notices
from distensor_tui.sections import apply

WIDE, SMALL = (120, 40), (80, 24)


def flat(shown: str) -> str:
    """One text of what stands in the panels of a column, without their frames."""
    return " ".join(shown.replace("│", " ").split())


def alone(fault: dict[str, Any], **sections: Any) -> Any:
    return live(faults=[fault], **sections)


def test_a_worker_in_a_crash_loop_is_told_in_the_panel_of_jobs() -> None:
    view = alone(fake.CRASH_LOOP)
    shown = flat(text(view, (200, 60)))
    assert "✖ crash_loop since 14:11" in shown
    assert "cause rank 2 of llama-1b: out of memory (exit 137), 5 times in a row" in shown
    assert "fix `distensor retry w-2` (b in the dashboard) starts it again" in shown
    assert "log press 2, then l on its row, or distensor logs --worker w-2" in shown
    assert "last exit: killed by signal 9" not in shown, "the fault says it already"
    assert "crash_loop" in text(view, SMALL, on(Screen.JOBS))
    inside = flat(text(view, WIDE, replace(on(Screen.JOBS), place=on(Screen.JOBS, path=("job-1", "w-2")).place)))
    assert "fault crash_loop, since 14:11 cause rank 2" in inside
    assert "log distensor logs --worker w-2" in inside


def test_a_lost_device_is_told_in_the_panel_of_devices_and_in_its_details() -> None:
    gone = fake.device("gpu1", usable=False, fault=True, reason="it fell off the bus")
    view = alone(fake.DEVICE_LOST, devices=[fake.gpu(), gone])
    assert "✖ device_lost: the driver says that it fell off" in text(view, SMALL)
    inside = text(view, WIDE, replace(on(Screen.DEVICES), place=on(Screen.DEVICES, path=("gpu1",)).place))
    assert "fault         device_lost" in inside
    assert "log           distensor logs" in inside


def test_a_full_disk_is_told_beside_the_money_and_the_money_stays() -> None:
    shown = text(alone(fake.DISK_FULL), SMALL)
    assert "today 1.840 credits" in shown
    assert "✖ disk_full: cannot write receipts/2026-09-21.jsonl: No space left on device" in shown
    assert "fix free some space there; work goes on, and the hub's books count   log 7" in shown
    assert "disk_full" in text(alone(fake.DISK_FULL), WIDE, on(Screen.EARNINGS))


def test_a_hub_that_refuses_is_told_where_jobs_would_be_or_beside_the_money_while_one_runs() -> None:
    shown = flat(text(VIEWS["refused"](), WIDE))
    assert "No job, and none can come: " in shown
    assert "✖ authentication since 14:11, next 14:14:20" in shown
    running = text(alone(fake.REFUSED), (200, 60))
    earnings = running[running.index("Earnings 4") :]
    assert "✖ authentication" in earnings
    assert "No job" not in running


def test_each_is_a_notice_with_what_to_do() -> None:
    found = notices(scene(VIEWS["error"](), WIDE))
    for fault in (fake.DISK_FULL, fake.DEVICE_LOST, fake.CRASH_LOOP):
        assert any(text.endswith(f"{fault['cause']}; {fault['fix']}") for _, text in found)


def test_of_workers_that_ended_with_their_job_the_panel_on_home_says_nothing() -> None:
    gone = fake.worker(3, id="w-3", job="job-0", state="exited", pid=None, last_exit="released: rank 1 is gone")
    ended = fake.job(id="job-0", name="done", state="ended")
    home = text(live(jobs=[ended, fake.job()], workers=[gone, fake.worker(1)]), SMALL)
    assert "1 worker " in home
    assert "▲ last exit: released" not in home
    view = live(jobs=[ended], workers=[gone])
    assert "▲ last exit: released: rank 1 is gone" in text(view, SMALL, on(Screen.JOBS)), "but told where jobs are"
    assert pause_text(scene(view, SMALL)).startswith("No worker runs now")


def test_a_worker_that_ended_in_a_job_that_goes_on_is_shown() -> None:
    gone = fake.worker(2, state="exited", pid=None, last_exit="refused program: torch.load")
    assert "refused program" in text(live(workers=[gone]), SMALL)


def test_a_degraded_node_says_what_is_broken_and_what_to_do() -> None:
    found = [words for _, words in notices(scene(VIEWS["degraded"](), WIDE))]
    assert found == [f"Degraded: {fake.CRASH_LOOP['cause']}; {fake.CRASH_LOOP['fix']}"]


def test_the_status_in_words_says_them_too() -> None:
    said = plain.status(live(faults=[fake.CRASH_LOOP]).snapshot, fake.NOW)
    assert "broken     crash_loop: rank 2 of llama-1b: out of memory (exit 137), 5 times in a row" in said
    assert "           distensor logs --worker w-2" in said


@pytest.mark.parametrize(
    ("section", "screen"), [("income", Screen.EARNINGS), ("limits", Screen.LIMITS), ("usage", Screen.HOME)]
)
def test_a_section_that_the_supervisor_could_not_build_is_an_error_of_its_panel(section: str, screen: Screen) -> None:
    view = live(**{section: {"error": "Income failed in sections: KeyError: [red]"}})
    assert getattr(view.snapshot, section) is None, "not an account of zeros"
    for shown in (text(view, WIDE, on(screen)), text(view, (200, 60))):
        assert "✖ section_failed" in shown
        assert "KeyError: [red]" in flat(shown)
        assert "distensor bugreport" in flat(shown)
    again = apply(view.snapshot, {section: fake.snapshot()[section]}, full=False)
    assert again.failed == {}
    assert getattr(again, section) is not None


def test_a_hub_with_an_error_is_no_failed_section() -> None:
    snapshot = apply(
        Snapshot(), {"hub": fake.hub("offline", error={"code": "x", "message": "y", "fix": "z"})}, full=True
    )
    assert snapshot.failed == {}
    assert snapshot.hub is not None


@pytest.mark.parametrize("raw", [5, [5], [{}], [{"part": 3, "code": None, "since": "x"}], {"error": 7}])
def test_strange_faults_break_nothing(raw: Any) -> None:
    for size in (SMALL, WIDE):
        assert text(live(faults=raw), size)


def test_hostile_words_in_a_fault_are_shown_as_they_are() -> None:
    bad = fake.fault("worker", "w-2", "[red]", "[/] \x1b[2J", "[b", log="[link=x]")
    shown = text(alone(bad), WIDE)
    assert "✖ [red]" in shown
    assert "\x1b" not in shown
