"""What the supervisor last answered to a screen's own question, kept with the screens, or why it refused."""

from __future__ import annotations

from collections.abc import Callable

from distensor_tui.fields import clean
from distensor_tui.scene import Ask, Scene, Ui
from distensor_tui.wire import Answer

_REFUSED = "\x00"
"""Before the reason of a refusal; no text from outside holds it."""


def ask_for(name: str, method: str, params: dict[str, object], text_of: Callable[[Answer], str]) -> Ask:
    """The request whose answer is remembered as `name`: its text, or the reason why there is none."""

    def keep(scene: Scene, answer: Answer) -> Ui:
        return scene.ui.remembers(name, text_of(answer) if answer.ok else _REFUSED + _reason(answer))

    return Ask(method=method, done="", params=params, then=keep)


def _reason(answer: Answer) -> str:
    fix = f" ({answer.fix})" if answer.fix else ""
    return clean(f"{answer.message or answer.code or 'no reason given'}{fix}")


def known(ui: Ui, name: str) -> str | None:
    """The text; None when the answer is not there yet or was a refusal."""
    text = ui.own.get(name)
    return None if text is None or text.startswith(_REFUSED) else text


def refusal(ui: Ui, name: str) -> str:
    """Why there is none; empty while nothing is known."""
    text = ui.own.get(name, "")
    return text[1:] if text.startswith(_REFUSED) else ""
