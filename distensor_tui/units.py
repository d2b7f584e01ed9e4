"""Single units of the node's account: asked for while they are looked at, kept with what the user has opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distensor_tui.remembered import ask_for, known, refusal
from distensor_tui.scene import Ask, Ui
from distensor_tui.wire import Answer

MOST = 200
ALL = "all"


def ask(standing: str) -> Ask:
    """The request for the newest units of one standing, or of all."""
    params: dict[str, object] = {"most": MOST}
    if standing != ALL:
        params["standing"] = standing
    return ask_for(_slot(standing), "units", params, _text)


def _slot(standing: str) -> str:
    return f"units {standing}"


def _text(answer: Answer) -> str:
    units = answer.result.get("units")
    return json.dumps(units if isinstance(units, list) else [])


def units(ui: Ui, standing: str) -> Sequence[Mapping[str, Any]] | None:
    """The last known units; None when the answer is not there yet or was a refusal."""
    text = known(ui, _slot(standing))
    return None if text is None else [one for one in json.loads(text) if isinstance(one, dict)]


def problem(ui: Ui, standing: str) -> str:
    """Why there are none; empty while nothing is known."""
    return refusal(ui, _slot(standing))
