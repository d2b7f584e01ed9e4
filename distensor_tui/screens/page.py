"""What a screen is made of: rows to move through with their details, fixed rows above, panels below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distensor_tui.actions import Action
from distensor_tui.dialogs import Info, facts
from distensor_tui.scene import Ask, Look, Scene, Screen, Step, Ui
from distensor_tui.text import EMPTY, Line, Span, Tone, line, plain
from distensor_tui.views.draw import Panel, allot, box
from distensor_tui.views.header import Notice

Facts = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a list."""

    cells: Line
    facts: Callable[[], Facts] = list
    """Everything that is known of it: details, copy, and the panel 'Selected'."""
    words: str = ""
    """What the filter looks through besides the cells."""
    key: str = ""
    """What it is, for the cursor to stay on it while rows come and go; empty: the cursor keeps its number."""
    log: str = ""
    """The filter for the log that finds its events; empty when it has none."""
    file: str = ""
    """The worker whose log file `l` opens instead."""
    opens: tuple[str, ...] = ()
    """The path that Enter opens in this screen; without one it opens the details."""


class Page(NamedTuple):
    """One screen as a list. Rows come unfiltered; the frame filters them."""

    title: str
    head: list[Line]
    rows: Sequence[Row]
    empty: list[Line]
    below: tuple[Panel, ...] = ()
    tail: bool = False
    """Read from top to bottom like a file: the cursor counts from the last row, where it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScreenSpec:
    """One screen. A list has a `page`; Home draws itself by `draw`."""

    screen: Screen
    about: str
    """One line of help."""
    page: Callable[[Scene], Page] | None = None
    draw: Callable[[Scene, int], list[Line]] | None = None
    actions: tuple[Action, ...] = ()
    """The keys that only this screen has."""
    poll: Callable[[Scene], Ask | None] = lambda _scene: None
    """What is asked every other second while the screen is open; its answer goes to `then`."""
    notices: Callable[[Scene], list[Notice]] = lambda _scene: []
    """What the user should know, worst first; the first of all stands below the header, `n` shows the others."""


def titled(table: Sequence[Line]) -> tuple[list[Line], Sequence[Line]]:
    """Head and rows of a table; no head above no rows."""
    return (list(table[:1]), table[1:]) if len(table) > 1 else ([], [])


def shown_rows(spec: ScreenSpec, scene: Scene) -> Sequence[Row]:
    """The rows that the filter leaves."""
    if spec.page is None or not scene.view.has_data:
        return ()
    return matching(spec.page(scene).rows, scene.ui.filter)


def matching(rows: Sequence[Row], words: str) -> Sequence[Row]:
    """The rows that contain the filter, in any case."""
    wanted = words.lower()
    return [row for row in rows if wanted in f"{plain(row.cells)} {row.words}".lower()] if wanted else rows


def selected(spec: ScreenSpec, scene: Scene) -> Row | None:
    """The row under the cursor."""
    rows = shown_rows(spec, scene)
    return rows[index(spec, scene, len(rows))] if rows else None


def index(spec: ScreenSpec, scene: Scene, count: int) -> int:
    """The place of the cursor among so many rows, at least one."""
    cursor = min(scene.ui.cursor, count - 1)
    return count - 1 - cursor if reads_down(spec, scene) else cursor


def reads_down(spec: ScreenSpec, scene: Scene) -> bool:
    return spec.page is not None and scene.view.has_data and spec.page(scene).tail


def held(spec: ScreenSpec, before: Scene, after: Scene) -> Ui:
    """The cursor on the row where it was, though rows came and went. At the first row it stays there."""
    row = selected(spec, before) if after.ui.cursor else None
    if row is None or not row.key:
        return after.ui
    keys = [found.key for found in shown_rows(spec, after)]
    if row.key not in keys:
        return after.ui
    place = keys.index(row.key)
    return after.ui.at(cursor=len(keys) - 1 - place if reads_down(spec, after) else place)


def open_row(spec: ScreenSpec, scene: Scene) -> Step:
    """Enter: deeper into the screen, or the details."""
    row = selected(spec, scene)
    if row is None:
        return scene.ui, None
    if row.opens:
        return scene.ui.go(Ui().at(screen=spec.screen, path=row.opens).place), None
    return scene.ui.shows(details(spec)), None


def details(spec: ScreenSpec) -> Info:
    """A box with all facts of the row under the cursor; it stays up to date."""

    def content(scene: Scene, size: int) -> list[Line]:
        row = selected(spec, scene)
        return facts(row.facts(), size) if row else [line(("This row is gone.", Tone.DIM))]

    def text(scene: Scene) -> str:
        row = selected(spec, scene)
        return facts_text(row.facts()) if row else ""

    return Info(title="Details", content=content, copy=text)


def facts_text(pairs: Facts) -> str:
    return "\n".join(f"{name}: {value}" for name, value in pairs)


def body(spec: ScreenSpec, scene: Scene, height: int) -> list[Line]:
    """The screen in `height` lines."""
    if spec.draw is not None:
        return spec.draw(scene, height)
    assert spec.page is not None, f"{spec.screen.title} has neither page nor draw"
    found, look = spec.page(scene), scene.look
    rows = matching(found.rows, scene.ui.filter)
    window = _window(found, rows, scene, height)
    main = Panel(found.title, str(int(spec.screen)), window, _filter_note(scene, len(rows), len(found.rows)))
    wanted = [(len(p.rows) + 2, min(3, len(p.rows) + 2)) for p in found.below]
    first = len(window) + 2 if found.below else height
    heights = allot(height, [(first, min(first, max(5, height // 3))), *wanted])
    panels = zip((main, *found.below), heights, strict=True)
    return [row for p, h in panels for row in box(p, look.width, h, look.glyphs)]


def _filter_note(scene: Scene, shown: int, known: int) -> Line:
    if not scene.ui.filter:
        return EMPTY
    return line((f"filter: {scene.ui.filter}", Tone.WARN), (f"  {shown} of {known}", Tone.DIM))


def _window(found: Page, rows: Sequence[Row], scene: Scene, height: int) -> list[Line]:
    """The part of the rows around the cursor."""
    if not rows:
        return [*found.head, *(_no_match(scene) if found.rows else found.empty)]
    room = max(1, height - 2 - len(found.head) - sum(min(6, len(p.rows) + 2) for p in found.below))
    cursor = min(scene.ui.cursor, len(rows) - 1)
    cursor = len(rows) - 1 - cursor if found.tail else cursor
    start = max(0, min(cursor - room // 2, len(rows) - room))
    shown = rows[start : start + room]
    marked = [_marked(row.cells, start + i == cursor, scene.look) for i, row in enumerate(shown)]
    return [*((Span("  "), *row) for row in found.head), *marked]


def _no_match(scene: Scene) -> list[Line]:
    return [line((f"Nothing here contains '{scene.ui.filter}'; Esc drops the filter.", Tone.DIM))]


def _marked(row: Line, here: bool, look: Look) -> Line:
    if not here:
        return (Span("  "), *row)
    return (Span(f"{look.glyphs.cursor} ", Tone.ACCENT), *_brighter(row))


def _brighter(row: Line) -> Line:
    """The row under the cursor: plain spans brighter, coloured ones as they are."""
    return tuple(Span(s.text, Tone.CURSOR) if s.tone in (Tone.TEXT, Tone.DIM, Tone.STRONG) else s for s in row)


def selected_panel(rows: Sequence[Row], scene: Scene, size: int) -> tuple[Panel, ...]:
    """The row under the cursor in full, for what a table row cuts off."""
    left = matching(rows, scene.ui.filter)
    if not left:
        return ()
    return (Panel("Selected", "", facts(left[min(scene.ui.cursor, len(left) - 1)].facts(), size)),)
