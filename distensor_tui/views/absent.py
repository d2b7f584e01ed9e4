"""The middle of the screen when no snapshot ever came: connecting, or why there is no supervisor."""

from __future__ import annotations

from distensor_tui.absence import Absence
from distensor_tui.scene import Link, Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, line, wrap
from distensor_tui.views.draw import Panel, box, paragraph


def no_data(view: View, look: Look) -> list[Line]:
    size = min(look.width - 4, 92)
    absence = view.feed.absence
    if absence is None:
        rows = _loading(view, size - 6)
        return box(Panel("Connecting", "", rows), size, len(rows) + 2, look.glyphs)
    rows = absent_rows(absence, size - 6, look)
    if view.feed.retry_at is not None and view.feed.link is not Link.LIVE:
        rows = [*rows, line(("Trying again by itself; this view opens as soon as it answers.", Tone.DIM)), EMPTY]
    padded = [(Span(" "), *row) for row in rows]
    return box(Panel(absence.title, "", padded), size, min(len(padded) + 2, look.height - 3), look.glyphs)


def _loading(view: View, size: int) -> list[Line]:
    where = view.feed.source or "the supervisor"
    return [EMPTY, *((Span(" "), *row) for row in paragraph(f"Connecting to {where}", size)), EMPTY]


def absent_rows(absence: Absence, size: int, look: Look) -> list[Line]:
    fixes = [row for fix in absence.fix for row in _fix(fix, size, look)]
    return [EMPTY, *paragraph(absence.detail, size), EMPTY, *fixes, EMPTY]


def _fix(fix: str, size: int, look: Look) -> list[Line]:
    """A command that does not fit beside its words stands below them, whole: it is there to be typed."""
    mark = (f"{look.glyphs.right} ", Tone.ACCENT)
    words, colon, command = fix.partition(":  ")
    if len(fix) + 2 <= size or not colon:
        return [line(mark, (fix, Tone.STRONG))]
    below = [line(("    " + part, Tone.STRONG)) for part in wrap(command.strip(), size - 4)]
    return [line(mark, (words + ":", Tone.STRONG)), *below]
