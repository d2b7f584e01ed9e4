"""The palette: all actions and screens by a few letters of their name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distensor_tui.actions import Action, perform
from distensor_tui.scene import Scene, Step, Ui
from distensor_tui.text import EMPTY, Line, Tone, fill, line

LONGEST = 60
KEY_CELLS = 7


def score(wanted: str, name: str) -> int | None:
    """How well the letters fit: all in order; words' beginnings and runs count more. None when they do not fit."""
    text, total, at, last = name.lower(), 0, 0, -2
    for letter in wanted.lower().replace(" ", ""):
        at = text.find(letter, at)
        if at < 0:
            return None
        total += 1 + 2 * (at == last + 1) + 3 * (at == 0 or text[at - 1] == " ")
        last, at = at, at + 1
    return total


def matching(wanted: str, actions: Sequence[Action]) -> list[Action]:
    """The actions that fit, the best first; in their own order when nothing is typed."""
    scored = [(points, action) for action in actions if (points := score(wanted, action.name)) is not None]
    return [action for _, action in sorted(scored, key=lambda pair: -pair[0])]


@dataclass(frozen=True, kw_only=True, slots=True)
class Palette:
    """A line of letters and the actions that fit it."""

    actions: Callable[[Scene], Sequence[Action]]
    title: str = "What do you want to do?"
    value: str = ""
    cursor: int = 0

    def _found(self, scene: Scene) -> list[Action]:
        return matching(self.value, [action for action in self.actions(scene) if action.palette])

    def rows(self, scene: Scene, size: int, height: int) -> list[Line]:
        found = self._found(scene)
        room = max(1, height - 2)
        start = max(0, min(self.cursor - room // 2, len(found) - room))
        listed = [self._row(action, i, scene) for i, action in enumerate(found)][start : start + room]
        nothing = [line(("Nothing fits these letters.", Tone.DIM))]
        head = line((": ", Tone.KEY), (self.value, Tone.STRONG), (" ", Tone.PILL_CALM))
        return [head, EMPTY, *(listed or nothing), *[EMPTY] * (room - max(1, len(listed)))]

    def _row(self, action: Action, index: int, scene: Scene) -> Line:
        here = index == self.cursor
        mark = scene.look.glyphs.cursor if here else " "
        name = (fill(action.name, 26) + " ", Tone.CURSOR if here else Tone.TEXT)
        reason = action.unless(scene)
        about = (reason, Tone.WARN) if reason else (action.about, Tone.DIM)
        return line((f"{mark} ", Tone.ACCENT), name, (fill(action.key, KEY_CELLS), Tone.KEY), about)

    def press(self, scene: Scene, key: str, character: str | None) -> Step:
        closed = replace(scene, ui=scene.ui.shows(None))
        if key in ("escape", "ctrl+p"):
            return closed.ui, None
        if key == "enter":
            found = self._found(scene)
            return perform(found[self.cursor], closed) if found else (scene.ui, None)
        return scene.ui.shows(self._edited(scene, key, character)), None

    def _edited(self, scene: Scene, key: str, character: str | None) -> Palette:
        if key in ("up", "down"):
            last = max(0, len(self._found(scene)) - 1)
            return replace(self, cursor=min(max(0, self.cursor + (1 if key == "down" else -1)), last))
        if key == "backspace":
            return replace(self, value=self.value[:-1], cursor=0)
        if character and character.isprintable():
            return replace(self, value=(self.value + character)[:LONGEST], cursor=0)
        return self

    def paste(self, scene: Scene, text: str) -> Ui:
        return scene.ui
