"""Keys and clicks: each a pure step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distensor_tui.scene import Overlay, Screen, Ui
from distensor_tui.text import Tone, line
from distensor_tui.ui import Ask, Copy, Effect, Quit, press
from distensor_tui.views.hits import key_at

HOUR = Ask(method="pause", done="Paused for one hour.", params={"seconds": 3600})


def steps(keys: str, ui: Ui | None = None, rows: int = 20) -> tuple[Ui, Effect]:
    """Press several keys; the last effect."""
    ui, effect = ui or Ui(), None
    for key in keys.split():
        ui, effect = press(ui, key, key if len(key) == 1 else None, rows)
    return ui, effect


@pytest.mark.parametrize("screen", list(Screen), ids=lambda screen: screen.title)
def test_a_digit_opens_its_screen(screen: Screen) -> None:
    assert steps(f"2 down {int(screen)}")[0] == Ui(screen=screen)


@pytest.mark.parametrize(
    ("keys", "overlay", "effect"),
    [
        ("p", Overlay.PAUSE, None),
        ("p 1", Overlay.NONE, HOUR),
        ("p 2", Overlay.NONE, Ask(method="pause", done="Paused until you resume (r).")),
        ("p escape", Overlay.NONE, None),
        ("p p", Overlay.NONE, None),
        ("p x", Overlay.PAUSE, None),
        ("p y", Overlay.PAUSE, None),
        ("p r", Overlay.PAUSE, None),
        ("d", Overlay.DRAIN, None),
        ("d y", Overlay.NONE, Ask(method="drain", done="Draining: no new work is taken.")),
        ("d n", Overlay.NONE, None),
        ("d 1", Overlay.DRAIN, None),
        ("r", Overlay.NONE, Ask(method="resume", done="Resumed.")),
        ("w", Overlay.WHY, None),
        ("w q", Overlay.NONE, None),
        ("question_mark", Overlay.HELP, None),
        ("q", Overlay.NONE, Quit()),
        ("ctrl+c", Overlay.NONE, Quit()),
        ("p ctrl+c", Overlay.PAUSE, Quit()),
        ("y", Overlay.NONE, Copy()),
    ],
)
def test_actions_and_their_confirmations(keys: str, overlay: Overlay, effect: Effect) -> None:
    ui, found = steps(keys)
    assert (ui.overlay, found) == (overlay, effect)


@pytest.mark.parametrize(
    ("keys", "cursor"),
    [("down", 1), ("down up up", 0), ("j j k", 1), ("pagedown", 10), ("end", 19), ("end down", 19), ("end home", 0)],
)
def test_the_cursor_stays_in_the_table(keys: str, cursor: int) -> None:
    assert steps(keys, Ui(screen=Screen.LOG))[0].cursor == cursor


def test_without_rows_nothing_moves_and_nothing_opens() -> None:
    assert steps("down enter", Ui(screen=Screen.JOBS), rows=0)[0] == Ui(screen=Screen.JOBS)


def test_enter_drills_down_and_escape_goes_back() -> None:
    ui, _ = steps("enter")
    assert ui.screen is Screen.JOBS
    ui, _ = steps("enter", ui)
    assert ui.overlay is Overlay.DETAIL
    ui, _ = steps("escape escape", ui)
    assert ui == Ui()


def test_the_filter_takes_every_letter_until_enter() -> None:
    ui, effect = steps("slash q p backspace 1 enter")
    assert (ui.screen, ui.filter, ui.typing, effect) == (Screen.LOG, "q1", False, None)
    assert steps("escape", ui)[0] == replace(ui, filter="")
    assert steps("slash a escape")[0].filter == ""


@pytest.mark.parametrize(
    ("x", "key"), [(0, None), (1, "p"), (3, "p"), (9, None), (10, "question_mark"), (13, "question_mark"), (99, None)]
)
def test_a_click_is_the_key_it_shows(x: int, key: str | None) -> None:
    row = line(" ", ("p", Tone.KEY), (" pause", Tone.DIM), "  ", ("?", Tone.KEY), (" help", Tone.DIM))
    assert key_at(row, x) == key


def test_a_click_on_a_panels_title_opens_its_screen() -> None:
    row = line(("+-", Tone.BORDER), (" Jobs", Tone.TITLE), (" 2", Tone.KEY), ("----", Tone.BORDER))
    assert [key_at(row, x) for x in (0, 3, 8, 10)] == [None, "2", "2", None]
