"""One whole screen as lines: exactly `height` lines of exactly `width` cells."""

from __future__ import annotations

from distensor_tui.glyphs import ASCII
from distensor_tui.keys import footer_keys
from distensor_tui.scene import Look, Scene, View
from distensor_tui.screens.page import body
from distensor_tui.screens.table import notices, spec
from distensor_tui.text import EMPTY, Line, Span, Tone, cut, line, pad, pad_rows, toned
from distensor_tui.views import header
from distensor_tui.views.absent import no_data
from distensor_tui.views.draw import Panel, ascii_only, box, lay_over


def frame(scene: Scene) -> list[Line]:
    look = scene.look
    rows = pad_rows(_rows(scene), look.height, look.width)
    return [ascii_only(row) for row in rows] if look.glyphs is ASCII else rows


def _rows(scene: Scene) -> list[Line]:
    view, look, ui = scene.view, scene.look, scene.ui
    if look.too_small:
        return _too_small(view, look)
    if not view.has_data:
        return _without_data(scene)
    top = header.header(view, look)
    middle = body(spec(scene), scene, look.height - len(top) - 2)
    if view.stale:
        top, middle = [_grey(row) for row in top], [_grey(row) for row in middle]
    foot = header.footer(look, ui, footer_keys(scene))
    rows = [*top, header.notice(view, look, ui, notices(scene)), *middle, foot]
    return lay_over(rows, dialog(scene), look.width)


def dialog(scene: Scene) -> list[Line]:
    """The lines of the open box, none when there is none."""
    found, look = scene.ui.dialog, scene.look
    if found is None:
        return []
    rows = found.rows(scene, look.dialog_cells, look.dialog_rows)
    padded = [EMPTY, *((Span(" "), *row) for row in rows), EMPTY]
    height = min(len(padded) + 2, look.height - 2)
    return box(Panel(found.title, "", padded), look.dialog_cells + 6, height, look.glyphs)


def _grey(row: Line) -> Line:
    return toned(row, Tone.FAINT)


def _without_data(scene: Scene) -> list[Line]:
    view, look = scene.view, scene.look
    rows = pad_rows([*header.header(view, look)], look.height - 1, look.width)
    rows.append(header.footer(look, scene.ui, footer_keys(scene)))
    lid = dialog(scene)
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
