"""One whole screen as lines: exactly `height` lines of exactly `width` cells."""

from __future__ import annotations

from distensor_tui.glyphs import ASCII
from distensor_tui.scene import Look, Screen, Ui, View
from distensor_tui.text import EMPTY, Line, Tone, cut, line, pad, pad_rows, toned
from distensor_tui.views import header, home, overlays, pages
from distensor_tui.views.draw import ascii_only, lay_over
from distensor_tui.views.overlays import no_data


def frame(view: View, look: Look, ui: Ui) -> list[Line]:
    rows = pad_rows(_rows(view, look, ui), look.height, look.width)
    return [ascii_only(row) for row in rows] if look.glyphs is ASCII else rows


def _rows(view: View, look: Look, ui: Ui) -> list[Line]:
    if look.too_small:
        return _too_small(view, look)
    if not view.has_data:
        return _without_data(view, look, ui)
    top = header.header(view, look)
    height = look.height - len(top) - 2
    middle = home.body(view, height, look) if ui.screen is Screen.HOME else pages.body(view, height, look, ui)
    if view.stale:
        top, middle = [_grey(row) for row in top], [_grey(row) for row in middle]
    rows = [*top, header.notice(view, look, ui), *middle, header.footer(look, ui)]
    return lay_over(rows, overlays.overlay(view, look, ui), look.width)


def _grey(row: Line) -> Line:
    return toned(row, Tone.FAINT)


def _without_data(view: View, look: Look, ui: Ui) -> list[Line]:
    rows = pad_rows([*header.header(view, look)], look.height - 1, look.width)
    rows.append(header.footer(look, ui))
    lid = overlays.overlay(view, look, ui)
    if lid:
        return lay_over(rows, lid, look.width)
    middle = no_data(view, look)
    top = max(1, (look.height - len(middle)) // 2)
    left = (look.width - sum(len(s.text) for s in middle[0])) // 2
    for offset, row in enumerate(middle[: look.height - 1 - top]):
        rows[top + offset] = pad((*line(" " * left), *row), look.width)
    return rows


def _too_small(view: View, look: Look) -> list[Line]:
    """What still fits: the state word, then the sizes."""
    node = view.snapshot.node
    word = f"{look.glyphs.states[node.state]} {node.state}  " if node else ""
    text = f"{word}too small: {look.width}x{look.height}, needs 60x15"
    if look.width < 1:
        return [EMPTY]
    return [cut(line((text, Tone.WARN)), look.width) if len(text) > look.width else line((text, Tone.WARN))]
