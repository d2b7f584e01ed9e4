"""Single units of the node's account: asked for while they are looked at, kept with what the user has opened."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distensor_tui.fields import clean
from distensor_tui.scene import Ask, Scene, Ui
from distensor_tui.wire import Answer

MOST = 200
ALL = "all"
_PROBLEM = "\x00"


def ask(standing: str) -> Ask:
    """The request for the newest units of one standing, or of all."""
    params: dict[str, object] = {"most": MOST}
    if standing != ALL:
        params["standing"] = standing

    def keep(scene: Scene, answer: Answer) -> Ui:
        return scene.ui.remembers(f"units {standing}", _text(answer))

    return Ask(method="units", done="", params=params, then=keep)


def _text(answer: Answer) -> str:
    if not answer.ok:
        fix = f" ({answer.fix})" if answer.fix else ""
        return _PROBLEM + clean(f"{answer.message or answer.code or 'no reason given'}{fix}")
    units = answer.result.get("units")
    return json.dumps(units if isinstance(units, list) else [])


def units(ui: Ui, standing: str) -> Sequence[Mapping[str, Any]] | None:
    """The last known units; None when the answer is not there yet or was a refusal."""
    text = ui.own.get(f"units {standing}")
    if text is None or text.startswith(_PROBLEM):
        return None
    return [one for one in json.loads(text) if isinstance(one, dict)]


def problem(ui: Ui, standing: str) -> str:
    text = ui.own.get(f"units {standing}", "")
    return text[1:] if text.startswith(_PROBLEM) else ""
