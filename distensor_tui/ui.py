"""What a key does: a pure step from one place in the dashboard to the next, with an effect or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distensor_tui.scene import Overlay, Screen, Ui

PAGE = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Send a request to the supervisor and say `done` when it agreed."""

    method: str
    done: str
    params: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave the view."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Put the selection on the clipboard."""


Effect = Ask | Quit | Copy | None

_OPEN = {"question_mark": Overlay.HELP, "p": Overlay.PAUSE, "d": Overlay.DRAIN, "w": Overlay.WHY}
_ANSWERS: dict[tuple[Overlay, str], Ask] = {
    (Overlay.PAUSE, "1"): Ask(method="pause", done="Paused for one hour.", params={"seconds": 3600}),
    (Overlay.PAUSE, "2"): Ask(method="pause", done="Paused until you resume (r)."),
    (Overlay.DRAIN, "y"): Ask(method="drain", done="Draining: no new work is taken."),
}
_AT_ONCE: dict[str, Effect] = {"q": Quit(), "r": Ask(method="resume", done="Resumed."), "y": Copy()}


def press(ui: Ui, key: str, character: str | None, rows: int) -> tuple[Ui, Effect]:
    """The step for one key. `rows` is how many rows the current table has."""
    if key == "ctrl+c":
        return ui, Quit()
    if ui.typing:
        return _type(ui, key, character), None
    if ui.overlay is not Overlay.NONE:
        return _in_overlay(ui, key)
    return _on_screen(ui, key, rows)


def _type(ui: Ui, key: str, character: str | None) -> Ui:
    if key == "enter":
        return replace(ui, typing=False)
    if key == "escape":
        return replace(ui, typing=False, filter="")
    if key == "backspace":
        return replace(ui, filter=ui.filter[:-1], cursor=0)
    if character and character.isprintable():
        return replace(ui, filter=(ui.filter + character)[:60], cursor=0)
    return ui


def _in_overlay(ui: Ui, key: str) -> tuple[Ui, Effect]:
    closed = replace(ui, overlay=Overlay.NONE)
    if (ui.overlay, key) in _ANSWERS:
        return closed, _ANSWERS[ui.overlay, key]
    if ui.overlay is Overlay.DETAIL and key == "y":
        return ui, Copy()
    if key in ("escape", "q", "enter", "n") or _OPEN.get(key) is ui.overlay:
        return closed, None
    return ui, None


def _on_screen(ui: Ui, key: str, rows: int) -> tuple[Ui, Effect]:
    if key in _OPEN:
        return replace(ui, overlay=_OPEN[key]), None
    if key in _AT_ONCE:
        return ui, _AT_ONCE[key]
    return _move(ui, key, rows), None


def _move(ui: Ui, key: str, rows: int) -> Ui:
    if len(key) == 1 and key in "1234567":
        return replace(ui, screen=Screen(int(key)), cursor=0, filter="")
    if key == "slash":
        return replace(ui, screen=Screen.LOG, cursor=0, typing=True)
    if key == "escape":
        return replace(ui, filter="", cursor=0) if ui.filter else replace(ui, screen=Screen.HOME, cursor=0)
    if key == "enter":
        return _enter(ui, rows)
    return _move_cursor(ui, key, rows)


def _enter(ui: Ui, rows: int) -> Ui:
    if ui.screen is Screen.HOME:
        return replace(ui, screen=Screen.JOBS, cursor=0)
    return replace(ui, overlay=Overlay.DETAIL) if rows else ui


def _move_cursor(ui: Ui, key: str, rows: int) -> Ui:
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -PAGE, "pagedown": PAGE, "home": -rows, "end": rows}
    if key not in steps or not rows:
        return ui
    return replace(ui, cursor=min(max(0, ui.cursor + steps[key]), rows - 1))
