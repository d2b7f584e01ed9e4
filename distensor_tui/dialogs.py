"""Boxes that take the keys: something to read, a choice with its consequence, a line to type.

All are values; a key makes a new one. Features use these, or write their own after `scene.Dialog`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from distensor_tui.scene import Copy, Effect, Scene, Step, Ui
from distensor_tui.text import EMPTY, Line, Span, Tone, fill, line, wrap

LONGEST_INPUT = 4096
SCROLL = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10, "home": -100_000, "end": 100_000}
KEY_CELLS = 7


def _closed(scene: Scene, effect: Effect = None) -> Step:
    return scene.ui.shows(None), effect


def _plain(text: str) -> str:
    return "".join(character for character in text if character.isprintable())


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """Something to read, computed anew for each frame; scrolls when it is longer than the screen."""

    title: str
    content: Callable[[Scene, int], list[Line]]
    key: str = ""
    """The key that opened it also closes it."""
    copy: Callable[[Scene], str] | None = None
    actions: tuple[tuple[str, str, Callable[[Scene], Step]], ...] = ()
    """Further keys: name, word in the last line, step."""
    offset: int = 0

    def rows(self, scene: Scene, size: int, height: int) -> list[Line]:
        found = self.content(scene, size)
        foot = self._foot()
        room = self._room(height)
        if len(found) <= room + 1:
            return [*found, *foot]
        start = min(self.offset, len(found) - room)
        more = line((f"lines {start + 1} to {start + room} of {len(found)}; Up and Down scroll", Tone.DIM))
        return [*found[start : start + room], more, *foot]

    def _room(self, height: int) -> int:
        """The lines of the content beside the one that counts them."""
        return max(1, height - len(self._foot()) - 1)

    def _foot(self) -> list[Line]:
        if not self.actions:
            return []
        words = [span for key, word, _ in self.actions for span in ((key, Tone.KEY), (f" {word}   ", Tone.DIM))]
        return [EMPTY, line(*words)]

    def press(self, scene: Scene, key: str, character: str | None) -> Step:
        for name, _, step in self.actions:
            if key == name:
                return step(scene)
        if key == "y" and self.copy is not None:
            return scene.ui, Copy(self.copy(scene))
        if key in SCROLL:
            last = max(0, len(self.content(scene, scene.look.dialog_cells)) - self._room(scene.look.dialog_rows))
            return scene.ui.shows(replace(self, offset=min(max(0, self.offset + SCROLL[key]), last))), None
        return _closed(scene) if key in ("escape", "q", "enter", "n", self.key) else (scene.ui, None)

    def paste(self, scene: Scene, text: str) -> Ui:
        return scene.ui


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One answer to a question."""

    key: str
    label: str | Callable[[Scene], str]
    step: Callable[[Scene], Step]
    """Gets the scene with the question closed."""

    def words(self, scene: Scene) -> str:
        return self.label if isinstance(self.label, str) else self.label(scene)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choose:
    """A question that says the consequence. Its keys answer; Up, Down and Enter too, starting at 'no'."""

    title: str
    text: Callable[[Scene], str]
    options: tuple[Option, ...]
    refuse: str
    """The words for Esc: 'do not pause'."""
    cursor: int | None = None

    def rows(self, scene: Scene, size: int, height: int) -> list[Line]:
        said = [line(part) for part in wrap(self.text(scene), size)]
        answers = [(option.key, option.words(scene)) for option in self.options] + [("Esc", self.refuse)]
        rows = [self._answer(i, *answer, scene) for i, answer in enumerate(answers)]
        return [*said[: max(1, height - len(rows) - 1)], EMPTY, *rows]

    def _answer(self, index: int, key: str, words: str, scene: Scene) -> Line:
        here = index == self._at()
        mark = scene.look.glyphs.cursor if here else " "
        return line((f"{mark} ", Tone.ACCENT), (fill(key, 5), Tone.KEY), (words, Tone.CURSOR if here else Tone.TEXT))

    def _at(self) -> int:
        return len(self.options) if self.cursor is None else self.cursor

    def press(self, scene: Scene, key: str, character: str | None) -> Step:
        for option in self.options:
            if key == option.key:
                return self._take(option, scene)
        if key in ("up", "down", "k", "j"):
            moved = self._at() + SCROLL[key]
            return scene.ui.shows(replace(self, cursor=min(max(0, moved), len(self.options)))), None
        if key == "enter" and self._at() < len(self.options):
            return self._take(self.options[self._at()], scene)
        return _closed(scene) if key in ("escape", "q", "n", "enter") else (scene.ui, None)

    def _take(self, option: Option, scene: Scene) -> Step:
        return option.step(replace(scene, ui=scene.ui.shows(None)))

    def paste(self, scene: Scene, text: str) -> Ui:
        return scene.ui


def confirm(title: str, text: Callable[[Scene], str], yes: str, step: Callable[[Scene], Step], *, no: str) -> Choose:
    """A question with one answer, y, and Esc."""
    return Choose(title=title, text=text, options=(Option(key="y", label=yes, step=step),), refuse=no)


def no_complaint(_text: str) -> str:
    """Any text will do."""
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A line to type or paste. `check` says what is wrong with it; Enter hands it on only when nothing is."""

    title: str
    text: str
    label: str
    submit: Callable[[Scene, str], Step]
    """Gets the scene with the prompt closed, and the line without blanks around it."""
    check: Callable[[str], str] = no_complaint
    note: str = ""
    """What came of the last try, shown in place of the complaint until a key is pressed."""
    secret: bool = False
    value: str = field(default="", repr=False)
    cursor: int = 0
    tried: bool = False

    def rows(self, scene: Scene, size: int, height: int) -> list[Line]:
        said = [line(part) for part in wrap(self.text, size)]
        foot = line(("Enter", Tone.KEY), (" takes it   ", Tone.DIM), ("Esc", Tone.KEY), (" goes back", Tone.DIM))
        rows = [EMPTY, self._input(size), *self._complaint(size), EMPTY, foot]
        return [*said[: max(1, height - len(rows))], *rows]

    def _input(self, size: int) -> Line:
        label = f"{self.label} "
        room = max(8, size - len(label) - 2)
        shown = "*" * len(self.value) if self.secret else self.value
        start = max(0, self.cursor - room + 1)
        before, at, after = shown[start : self.cursor], shown[self.cursor : self.cursor + 1] or " ", self.cursor + 1
        return line(
            (label, Tone.DIM),
            (before, Tone.STRONG),
            (at, Tone.PILL_CALM),
            (shown[after : start + room], Tone.STRONG),
        )

    def _complaint(self, size: int) -> list[Line]:
        text = self.note or (self.check(self.value.strip()) if self.tried else "")
        return [line((part, Tone.BAD)) for part in wrap(text, size)] if text else [EMPTY]

    def press(self, scene: Scene, key: str, character: str | None) -> Step:
        if key == "escape":
            return _closed(scene)
        if key == "enter":
            return self._enter(scene)
        return scene.ui.shows(self._edited(key, character)), None

    def _enter(self, scene: Scene) -> Step:
        value = self.value.strip()
        if self.check(value):
            return scene.ui.shows(replace(self, tried=True, note="")), None
        return self.submit(replace(scene, ui=scene.ui.shows(None)), value)

    def _edited(self, key: str, character: str | None) -> Prompt:
        at, text = self.cursor, self.value
        places = {"left": at - 1, "right": at + 1, "home": 0, "end": len(text)}
        if key in places:
            return replace(self, cursor=min(max(0, places[key]), len(text)))
        if key == "backspace":
            return replace(self, value=text[: max(0, at - 1)] + text[at:], cursor=max(0, at - 1), note="")
        if key == "delete":
            return replace(self, value=text[:at] + text[at + 1 :], note="")
        return self._typed(_plain(character or ""))

    def _typed(self, added: str) -> Prompt:
        value = (self.value[: self.cursor] + added + self.value[self.cursor :])[:LONGEST_INPUT]
        note = "" if added else self.note
        return replace(self, value=value, cursor=min(len(value), self.cursor + len(added)), note=note)

    def paste(self, scene: Scene, text: str) -> Ui:
        return scene.ui.shows(self._typed(_plain(text)))


def facts(pairs: Sequence[tuple[str, str]], size: int, name_cells: int = 14) -> list[Line]:
    """Names and values, long values on several lines."""
    rows: list[Line] = []
    for name, value in pairs:
        first, *others = wrap(value, max(8, size - name_cells))
        rows.append((Span(fill(name, name_cells), Tone.DIM), Span(first)))
        rows += [line(" " * name_cells + other) for other in others]
    return rows
