"""Log files behind the supervisor: asked for while they are looked at, kept with what the user has opened."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui.fields import clean
from distensor_tui.remembered import ask_for, known, refusal
from distensor_tui.scene import Ask, Ui
from distensor_tui.wire import Answer

SUPERVISOR = "supervisor"
"""The name of its own file, which no worker has."""
LINES = 300


def ask(name: str) -> Ask:
    """The request for the last lines of a worker's file, or of the supervisor's own."""
    params: dict[str, object] = {"lines": LINES}
    if name != SUPERVISOR:
        params["worker"] = name
    return ask_for(_slot(name), "log_tail", params, _text)


def _slot(name: str) -> str:
    return f"log of {name}"


def _text(answer: Answer) -> str:
    lines = answer.result.get("lines")
    return "\n".join(clean(str(line)) for line in lines) if isinstance(lines, list) else ""


def lines(ui: Ui, name: str) -> Sequence[str] | None:
    """The last known lines, the newest last; None when the answer is not there yet, or was no file."""
    text = known(ui, _slot(name))
    return None if text is None else text.split("\n") if text else []


def problem(ui: Ui, name: str) -> str:
    """Why there are no lines; empty while nothing is known."""
    return refusal(ui, _slot(name))
