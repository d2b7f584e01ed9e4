"""What the user can do: one table feeds keys, footer, help and palette."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distensor_tui.scene import Say, Scene, Step

KEY_NAMES = {
    "question_mark": "?",
    "slash": "/",
    "colon": ":",
    "escape": "Esc",
    "enter": "Enter",
    "space": "Space",
    "up": "Up",
    "down": "Down",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "home": "Home",
    "end": "End",
    "left": "Left",
    "right": "Right",
    "plus": "+",
    "minus": "-",
    "ctrl+p": "^p",
}


def always(_scene: Scene) -> str:
    """No reason against it."""
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing to do. `keys` are Textual's names; the first is shown."""

    name: str
    """What the palette lists: 'Pause this node'."""
    keys: tuple[str, ...]
    about: str
    """One line of help."""
    do: Callable[[Scene], Step]
    unless: Callable[[Scene], str] = always
    """The reason why it cannot be done now; empty when it can."""
    footer: str = ""
    """The word in the footer; empty: not there."""
    palette: bool = True

    @property
    def key(self) -> str:
        return KEY_NAMES.get(self.keys[0], self.keys[0])


def find(actions: Iterable[Action], key: str) -> Action | None:
    """The first action with this key; a screen's own ones come first."""
    return next((action for action in actions if key in action.keys), None)


def perform(action: Action, scene: Scene) -> Step:
    """Do it, or say why it cannot be done."""
    reason = action.unless(scene)
    return (scene.ui, Say(reason)) if reason else action.do(scene)
