"""Screen text without a screen: spans of a tone, lines of spans, and arithmetic in terminal cells.

Nothing here parses markup, so that text from outside is always shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

cells = cell_len
"""How many terminal cells a text takes."""


class Tone(StrEnum):
    """What a piece of text means; the edge turns it into colours."""

    TEXT = "text"
    STRONG = "strong"
    DIM = "dim"
    FAINT = "faint"
    BORDER = "border"
    TITLE = "title"
    KEY = "key"
    BRAND = "brand"
    ACCENT = "accent"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    MINE = "mine"
    TRACK = "track"
    FILL_1 = "fill_1"
    FILL_2 = "fill_2"
    FILL_3 = "fill_3"
    FILL_4 = "fill_4"
    FILL_5 = "fill_5"
    COMPUTE = "compute"
    SYNC = "sync"
    WAIT = "wait"
    CURSOR = "cursor"
    PILL_GOOD = "pill_good"
    PILL_WARN = "pill_warn"
    PILL_BAD = "pill_bad"
    PILL_CALM = "pill_calm"


class Span(NamedTuple):
    text: str
    tone: Tone = Tone.TEXT


Line = tuple[Span, ...]
EMPTY: Line = ()


def line(*parts: Span | str | tuple[str, Tone]) -> Line:
    """Build a line; plain texts get the tone TEXT."""
    return tuple(Span(p) if isinstance(p, str) else Span(*p) for p in parts if p and (isinstance(p, str) or p[0]))


def plain(parts: Line) -> str:
    return "".join(span.text for span in parts)


def width(parts: Line) -> int:
    return sum(cells(span.text) for span in parts)


def pad(parts: Line, size: int) -> Line:
    """Exactly `size` cells: filled with blanks, or cut with an ellipsis."""
    missing = size - width(parts)
    if missing == 0:
        return parts
    if missing > 0:
        return (*parts, Span(" " * missing))
    return cut(parts, size)


def cut(parts: Line, size: int, *, ellipsis: str = "…") -> Line:
    """The first cells of a line that is too long; the last cell says that there was more."""
    if size <= 0:
        return EMPTY
    kept: list[Span] = []
    room = size - cells(ellipsis)
    for span in parts:
        length = cells(span.text)
        if length > room:
            kept.append(Span(set_cell_size(span.text, room) + ellipsis, span.tone))
            break
        kept.append(span)
        room -= length
    return pad(tuple(kept), size)


def clip(text: str, size: int) -> str:
    """A text of at most `size` cells."""
    return text if cells(text) <= size else plain(cut((Span(text),), size))


def fill(text: str, size: int, *, right: bool = False) -> str:
    """A text of exactly `size` cells."""
    text = clip(text, size)
    blanks = " " * (size - cells(text))
    return blanks + text if right else text + blanks


def spread(left: Line, right: Line, size: int) -> Line:
    """Left part at the left edge, right part at the right edge; the left one is cut first."""
    room = size - width(right)
    if room < 1:
        return pad(left, size)
    return (*pad(left, room), *right)


def toned(parts: Line, tone: Tone) -> Line:
    return tuple(Span(span.text, tone) for span in parts)


def join(parts: Iterable[Line], separator: Span) -> Line:
    """Lines after each other with a separator between those that are not empty."""
    joined: list[Span] = []
    for part in parts:
        if part:
            joined += [separator, *part] if joined else part
    return tuple(joined)


def merged(parts: Line) -> Line:
    """The same line with fewer spans: blanks take the tone before them, which costs the terminal nothing."""
    spans: list[Span] = []
    for span in parts:
        blank = not span.text.strip(" ") and not span.tone.value.startswith("pill")
        if spans and (spans[-1].tone is span.tone or (blank and not spans[-1].tone.value.startswith("pill"))):
            spans[-1] = Span(spans[-1].text + span.text, spans[-1].tone)
        else:
            spans.append(span)
    return tuple(spans)


def changed_cells(before: Line, after: Line) -> tuple[int, int]:
    """The cells from the first to the last span that differ, in two lines of the same width."""
    start = _common(before, after)
    rest = min(len(before), len(after)) - start
    end = min(rest, _common(before[::-1], after[::-1]))
    return width(after[:start]), width(after[: len(after) - end])


def _common(one: Line, other: Line) -> int:
    """How many spans are equal from the begin."""
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return same


def wrap(text: str, size: int) -> list[str]:
    """Break at blanks; a word longer than a line is cut into pieces."""
    lines, current = [], ""
    for word in text.split(" "):
        candidate = f"{current} {word}" if current else word
        if cells(candidate) <= size:
            current = candidate
            continue
        if current:
            lines.append(current)
        *pieces, current = _chunks(word, size)
        lines += pieces
    return [*lines, current] if current or not lines else lines


def _chunks(word: str, size: int) -> list[str]:
    pieces = []
    while cells(word) > size > 1:
        head = set_cell_size(word, size).rstrip(" ") or word[:1]
        pieces.append(head)
        word = word[len(head) :]
    return [*pieces, word]


def pad_rows(rows: Sequence[Line], height: int, size: int) -> list[Line]:
    """Exactly `height` lines of `size` cells."""
    shown = [pad(row, size) for row in rows[:height]]
    return shown + [pad(EMPTY, size)] * (height - len(shown))
