"""The middle of the screen when no snapshot ever came: connecting, or why there is no supervisor."""

from __future__ import annotations

from distensor_tui.absence import Absence
from distensor_tui.scene import Link, Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, line
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
    fixes = [line((f"{look.glyphs.right} ", Tone.ACCENT), (fix, Tone.STRONG)) for fix in absence.fix]
    return [EMPTY, *paragraph(absence.detail, size), EMPTY, *fixes, EMPTY]
