"""Drawing primitives: boxes, rules, bars, sparklines, tables, overlays and how panels share the height."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distensor_tui.glyphs import Glyphs
from distensor_tui.text import EMPTY, Line, Span, Tone, cells, cut, fill, line, pad, pad_rows, toned, width, wrap


class Panel(NamedTuple):
    """The contents of one panel, as many rows as it would like to show."""

    title: str
    key: str
    rows: list[Line]
    note: Line = EMPTY
    tail: bool = False
    """Show the last rows when there is too little room (logs), not the first."""


def box(panel: Panel, size: int, height: int, glyphs: Glyphs) -> list[Line]:
    """A framed panel of exactly this size."""
    if height < 2 or size < 6:
        return pad_rows(panel.rows, height, size)
    edge = Span(glyphs.vertical, Tone.BORDER)
    inside = _inner(panel, size - 4, height - 2, glyphs)
    body = [(edge, Span(" "), *row, Span(" "), edge) for row in inside]
    bottom = glyphs.corners[2] + glyphs.horizontal * (size - 2) + glyphs.corners[3]
    return [_top(panel, size, glyphs), *body, (Span(bottom, Tone.BORDER),)]


def section(panel: Panel, size: int, height: int, glyphs: Glyphs) -> list[Line]:
    """A panel with a rule instead of a frame, for small screens."""
    if height < 1:
        return []
    rows = [(Span(" "), *row) for row in _inner(panel, size - 1, height - 1, glyphs)]
    return [_rule(panel, size, glyphs), *rows]


def _title(panel: Panel) -> Line:
    key = (f" {panel.key}", Tone.KEY) if panel.key else ""
    return line((f" {panel.title}", Tone.TITLE), key, " ")


def _top(panel: Panel, size: int, glyphs: Glyphs) -> Line:
    left = Span(glyphs.corners[0] + glyphs.horizontal, Tone.BORDER)
    right = Span(glyphs.horizontal + glyphs.corners[1], Tone.BORDER)
    return (left, *_between(panel, size - 4, glyphs), right)


def _rule(panel: Panel, size: int, glyphs: Glyphs) -> Line:
    ends = Span(glyphs.horizontal, Tone.BORDER)
    return (ends, *_between(panel, size - 2, glyphs), ends)


def _between(panel: Panel, size: int, glyphs: Glyphs) -> Line:
    """Title, border, note; a long note is cut, then the title."""
    title = _title(panel)
    room = size - width(title) - 2
    note = _note(panel.note, room) if room > 8 else EMPTY
    gap = size - width(title) - width(note)
    return (*title, Span(glyphs.horizontal * gap, Tone.BORDER), *note) if gap >= 0 else cut(title, size)


def _note(note: Line, room: int) -> Line:
    if not note:
        return EMPTY
    framed = (Span(" "), *note, Span(" "))
    return framed if width(framed) <= room else cut(framed, room)


def _inner(panel: Panel, size: int, height: int, glyphs: Glyphs) -> list[Line]:
    rows = panel.rows
    hidden = len(rows) - height
    if hidden <= 0 or height < 1:
        return pad_rows(rows, height, size)
    if panel.tail:
        return pad_rows(rows[hidden:], height, size)
    if height == 1:
        return pad_rows(rows[:1], height, size)  # the first row says more than how many there are
    more = f"{glyphs.ellipsis} {hidden + 1} more" + (f" (press {panel.key})" if panel.key else "")
    return pad_rows([*rows[: height - 1], line((more, Tone.DIM))], height, size)


def bar(share: float | None, size: int, glyphs: Glyphs, tone: Tone = Tone.ACCENT) -> Line:
    """A horizontal gauge; unknown shares show the track only."""
    known = 0.0 if share is None else min(1.0, max(0.0, share))
    full = round(known * size) or (1 if known > 0.005 else 0)
    return line((glyphs.bar * full, tone), (glyphs.track * (size - full), Tone.TRACK))


def shares(values: Sequence[float], size: int) -> list[int]:
    """Whole cells for each value, in proportion, that add up to `size` exactly."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    ends = [round(size * sum(values[: i + 1]) / total) for i in range(len(values))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def sparkline(values: Sequence[float], size: int, glyphs: Glyphs) -> str:
    """The course of a series in `size` cells: the mean of each slice on a scale from least to greatest."""
    if not values or size < 1:
        return ""
    size = min(size, len(values))
    means = [_mean(values[len(values) * i // size : len(values) * (i + 1) // size]) for i in range(size)]
    low, high = min(means), max(means)
    top = len(glyphs.spark) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(glyphs.spark[round((m - low) * scale)] for m in means)


LABEL_CELLS = 8


def chart(
    values: Sequence[float], labels: tuple[str, str], size: int, height: int, glyphs: Glyphs, floor: float | None = None
) -> list[Line]:
    """The course of a series as an area; `labels` stand beside its greatest and least value."""
    columns = _levels(values, size - LABEL_CELLS, height, len(glyphs.spark), floor)
    rows = []
    for y in range(height - 1, -1, -1):
        label = labels[0] if y == height - 1 else labels[1] if y == 0 and labels[1] != labels[0] else ""
        rows.append(
            (Span(fill(label, LABEL_CELLS - 1, right=True) + " ", Tone.DIM), *_chart_row(columns, y, height, glyphs))
        )
    return rows


def _levels(values: Sequence[float], size: int, height: int, steps: int, floor: float | None) -> list[int]:
    """For each column how many steps of the height it fills: at least one, for the curve must not vanish."""
    shown = resampled(values, size)
    low, high = min(shown, default=0.0) if floor is None else floor, max(shown, default=0.0)
    if high <= low:
        return [steps * (height // 2) + 1] * len(shown)
    scale = (height * steps - 1) / (high - low)
    return [1 + max(0, round((value - low) * scale)) for value in shown]


def resampled(values: Sequence[float], size: int) -> list[float]:
    """The series at `size` places from its first to its last value, straight lines between."""
    if not values or size < 1:
        return []
    places = [i * (len(values) - 1) / max(1, size - 1) for i in range(size)]
    return [_between_values(values, place) for place in places]


def _between_values(values: Sequence[float], place: float) -> float:
    left = int(place)
    right = min(left + 1, len(values) - 1)
    return values[left] + (values[right] - values[left]) * (place - left)


FILLS = (Tone.FILL_1, Tone.FILL_2, Tone.FILL_3, Tone.FILL_4, Tone.FILL_5)


def _chart_row(columns: Sequence[int], y: int, height: int, glyphs: Glyphs) -> Line:
    """One row of cells: full below the curve, its edge where the curve is, blank above; brighter further up."""
    steps = len(glyphs.spark)
    tone = FILLS[y * len(FILLS) // height]
    text = "".join(" " if level <= y * steps else glyphs.spark[min(level - y * steps, steps) - 1] for level in columns)
    return line((text, tone))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Column(NamedTuple):
    title: str
    right: bool = False
    least: int = 0
    """A column may shrink to this width; 0 means never."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[Span | str]], size: int) -> list[Line]:
    """Header and rows in aligned columns. Shrinkable columns give way; what is still too wide is cut."""
    spans = [[cell if isinstance(cell, Span) else Span(cell) for cell in row] for row in rows]
    widths = _widths(columns, spans, size)
    titles = [Span(column.title, Tone.DIM) for column in columns]
    return [_table_row(columns, row, widths) for row in (titles, *spans)]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Span]], size: int) -> list[int]:
    widths = [max([cells(column.title), *(cells(row[i].text) for row in rows)]) for i, column in enumerate(columns)]
    excess = sum(widths) + 2 * len(widths) - 2 - size
    for i, column in sorted(enumerate(columns), key=lambda pair: -widths[pair[0]]):
        if excess > 0 and column.least:
            given = min(excess, max(0, widths[i] - column.least))
            widths[i] -= given
            excess -= given
    return widths


def _table_row(columns: Sequence[Column], row: Sequence[Span], widths: Sequence[int]) -> Line:
    last = len(columns) - 1
    return tuple(
        Span(fill(cell.text, widths[i], right=columns[i].right) + ("  " if i < last else ""), cell.tone)
        for i, cell in enumerate(row)
    )


def allot(total: int, needs: Sequence[tuple[int, int]]) -> list[int]:
    """Share a height among (wanted, least) panels, top ones first; the last one takes what is left."""
    heights = [0] * len(needs)
    for i, (_, least) in enumerate(needs):
        heights[i] = min(least, total - sum(heights))
    for i, (wanted, least) in enumerate(needs):
        heights[i] += max(0, min(wanted - least, total - sum(heights)))
    if heights:
        heights[-1] += total - sum(heights)
    return heights


def beside(*columns: list[Line]) -> list[Line]:
    """Panels of equal height next to each other."""
    return [tuple(span for row in rows for span in row) for rows in zip(*columns, strict=True)]


def crop(parts: Line, start: int, stop: int) -> Line:
    """The cells from start to stop of a line; half a wide character becomes a blank."""
    kept: list[Span] = []
    position = 0
    for span in parts:
        length = cells(span.text)
        if position + length > start and position < stop:
            kept.append(Span(_crop_text(span.text, start - position, stop - position), span.tone))
        position += length
    return tuple(kept)


def _crop_text(text: str, start: int, stop: int) -> str:
    if start <= 0 and stop >= cells(text):
        return text
    if text.isascii():
        return text[max(0, start) : stop]
    out, position = [], 0
    for character in text:
        length = cells(character)
        inside = max(0, min(stop, position + length) - max(start, position))
        out.append(character if inside == length else " " * inside)
        position += length
    return "".join(out)


def lay_over(frame: list[Line], lid: list[Line], size: int) -> list[Line]:
    """Draw a box over the middle of a frame, which is dimmed."""
    if not lid:
        return frame
    lid_width = width(lid[0])
    top, left = max(0, (len(frame) - len(lid)) // 2), max(0, (size - lid_width) // 2)
    dimmed = [toned(row, Tone.FAINT) for row in frame]
    for offset, row in enumerate(lid[: len(frame) - top]):
        under = dimmed[top + offset]
        dimmed[top + offset] = (*crop(under, 0, left), *row, *crop(under, left + lid_width, size))
    return [pad(row, size) for row in dimmed]


def paragraph(text: str, size: int, tone: Tone = Tone.TEXT) -> list[Line]:
    return [line((part, tone)) for part in wrap(text, max(8, size))]


def labelled(label: str, value: Line, label_width: int = 11) -> Line:
    return (Span(fill(label, label_width), Tone.DIM), *value)


def ascii_only(parts: Line) -> Line:
    """For terminals without UTF-8: nothing but ASCII, cell by cell."""
    if all(span.text.isascii() for span in parts):
        return parts
    return tuple(Span("".join(_plain_character(c) for c in span.text), span.tone) for span in parts)


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    return {"…": "~", "·": "-"}.get(character, "?" * cells(character))
