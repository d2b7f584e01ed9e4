"""Log files behind the supervisor: asked for while they are looked at, kept with what the user has opened."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui.fields import clean
from distensor_tui.scene import Ask, Scene, Ui
from distensor_tui.wire import Answer

SUPERVISOR = "supervisor"
"""The name of its own file, which no worker has."""
LINES = 300
_PROBLEM = "\x00"


def ask(name: str) -> Ask:
    """The request for the last lines of a worker's file, or of the supervisor's own."""
    params: dict[str, object] = {"lines": LINES}
    if name != SUPERVISOR:
        params["worker"] = name

    def keep(scene: Scene, answer: Answer) -> Ui:
        return scene.ui.remembers(f"log of {name}", _text(answer))

    return Ask(method="log_tail", done="", params=params, then=keep)


def _text(answer: Answer) -> str:
    if not answer.ok:
        fix = f" ({answer.fix})" if answer.fix else ""
        return _PROBLEM + clean(f"{answer.message or answer.code or 'no reason given'}{fix}")
    lines = answer.result.get("lines")
    return "\n".join(clean(str(line)) for line in lines) if isinstance(lines, list) else ""


def lines(ui: Ui, name: str) -> Sequence[str] | None:
    """The last known lines, the newest last; None when the answer is not there yet, or was no file."""
    text = ui.own.get(f"log of {name}")
    return None if text is None or text.startswith(_PROBLEM) else text.split("\n") if text else []


def problem(ui: Ui, name: str) -> str:
    """Why there are no lines; empty while nothing is known."""
    text = ui.own.get(f"log of {name}", "")
    return text[1:] if text.startswith(_PROBLEM) else ""
