"""Deeper than a screen's list: a job, a worker and its log file; the log's severities and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake
from test_tui_app import live as live_app
from test_tui_app import until
from test_tui_keys import steps
from test_tui_screens import compare, live, on, scene, text

from distensor_tui import logfile
from distensor_tui.frame import frame
from distensor_tui.keys import press
from distensor_tui.scene import Place, Screen, Ui
from distensor_tui.screens.page import held
from distensor_tui.screens.table import SCREENS
from distensor_tui.text import plain
from distensor_tui.wire import Answer

TRACE = ["loading stage 1", "[red] warning: slow", "Traceback (most recent call last):", "RuntimeError: \x1b[2J[/]"]


def answered(*lines: str, **changes: Any) -> Answer:
    return replace(Answer(id="1", ok=True, result={"lines": list(lines), "path": "/x", "more": False}), **changes)


def knows(name: str, answer: Answer, ui: Ui) -> Ui:
    keep = logfile.ask(name).then
    assert keep is not None
    return keep(scene(live(), (120, 40), ui), answer)


def test_enter_opens_a_job_then_a_worker_and_escape_comes_back() -> None:
    ui, _ = steps("2 enter down enter")
    assert ui.place == Place(screen=Screen.JOBS, path=("job-1", "w-2"))
    ui, _ = steps("escape", ui)
    assert ui.place == Place(screen=Screen.JOBS, path=("job-1",), cursor=1)
    assert steps("escape escape", ui)[0] == Ui()


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_a_job_shows_its_workers_stages_and_links(size: tuple[int, int]) -> None:
    shown = text(live(), size, on(Screen.JOBS, path=("job-1",)))
    compare(f"job-{size[0]}x{size[1]}", shown)
    for fact in ("Jobs ▸ llama-1b", "18,204", "[atlas-3:1]"):
        assert fact in shown, fact


def test_a_worker_shows_its_facts_and_its_log() -> None:
    ui = knows("w-2", answered(*TRACE), on(Screen.JOBS, path=("job-1", "w-2")))
    shown = text(live(), (120, 40), ui)
    compare("worker-120x40", shown)
    assert "[red] warning: slow" in shown
    assert "RuntimeError: ␛[2J[/]" in shown
    assert shown.index("loading stage 1") < shown.index("Traceback") < shown.index("▌ ✖ RuntimeError")


@pytest.mark.parametrize(
    ("path", "says"), [(("job-9",), "The job job-9 is gone."), (("job-1", "w-9"), "The worker w-9 is gone.")]
)
def test_what_is_gone_says_so(path: tuple[str, ...], says: str) -> None:
    assert says in text(live(), (80, 24), on(Screen.JOBS, path=path))


def test_l_on_a_worker_opens_its_file() -> None:
    assert steps("l", on(Screen.JOBS, path=("job-1",)))[0].place == Place(screen=Screen.LOG, path=("w-1",))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "Reading the file..."),
        (answered(), "No line to show"),
        (
            answered(ok=False, code="no_log", message="there is no [b]", fix="wait"),
            "Not available: there is no [b] (wait)",
        ),
        (answered(result={"lines": 3}), "No line to show"),
    ],
)
def test_a_file_without_lines_says_why(answer: Answer | None, says: str) -> None:
    ui = on(Screen.LOG, path=("w-1",))
    assert says in text(live(), (80, 24), knows("w-1", answer, ui) if answer else ui)


# the log


def rows(ui: Ui) -> str:
    return "\n".join(plain(row) for row in frame(scene(live(), (100, 30), ui)))


def test_severities_are_cycled() -> None:
    everything = rows(on(Screen.LOG))
    assert "joined the hub" in everything
    ui, _ = steps("7 s")
    assert "joined the hub" not in rows(ui)
    assert "killed by signal 9" in rows(ui)
    assert "warnings and errors only" in rows(ui)
    ui, _ = steps("s", ui)
    assert "No errors among 6 events; s shows the others." in rows(ui)
    assert rows(steps("s", ui)[0]) == everything


def test_a_file_is_read_downwards_from_its_end() -> None:
    ui = knows("w-1", answered(*(f"line {number}" for number in range(100))), on(Screen.LOG, path=("w-1",)))
    assert "▌   line 99" in rows(ui)
    assert "▌   line 98" in rows(steps("up", ui)[0])
    assert "▌   line 0" in rows(steps("home", ui)[0])
    assert steps("home end", ui)[0] == ui
    above = steps("up", ui)[0]
    after = knows("w-1", answered(*(f"line {number}" for number in range(5, 105))), above)
    spec = SCREENS[Screen.LOG]
    stayed = held(spec, scene(live(), (100, 30), above), scene(live(), (100, 30), after))
    assert "▌   line 98" in rows(stayed)


def test_the_files_are_offered_by_number() -> None:
    ui, _ = steps("7 f")
    assert "file of supervisor" in rows(ui)
    assert steps("2", ui)[0].place == Place(screen=Screen.LOG, path=("w-1",))
    assert logfile.ask("w-1").params == {"worker": "w-1", "lines": logfile.LINES}
    assert logfile.ask(logfile.SUPERVISOR).params == {"lines": logfile.LINES}


def test_the_cursor_keeps_its_line_while_news_come_and_follows_at_the_newest() -> None:
    spec, ui = SCREENS[Screen.LOG], on(Screen.LOG, cursor=2)
    news = live(events=[*fake.events(), fake.event(1, "one more"), fake.event(0, "and another")])
    before, after = scene(live(), (100, 30), ui), scene(news, (100, 30), ui)
    assert held(spec, before, after).cursor == 4
    assert held(spec, scene(live(), (100, 30), on(Screen.LOG)), scene(news, (100, 30), on(Screen.LOG))).cursor == 0
    gone = scene(live(events=[]), (100, 30), ui)
    assert held(spec, before, gone).cursor == 2
    assert press(before, "g", "g")[0].cursor == 0


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


@pytest.mark.asyncio
async def test_a_file_is_asked_for_while_it_is_open(path: Path) -> None:
    async with live_app(path) as (app, pilot, server):
        server.respond = lambda request: {"ok": True, "result": {"lines": ["hello from the worker"]}}
        await pilot.press("2", "enter", "enter")
        await until(pilot, lambda: "hello from the worker" in app.screen_text())
        assert {(r["method"], r["params"].get("worker")) for r in server.requests} == {("log_tail", "w-1")}
