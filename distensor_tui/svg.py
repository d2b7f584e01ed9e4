"""A frame as an SVG picture. Frames, bars and charts are drawn as shapes, so that no font can tear them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from distensor_tui.glyphs import UNICODE
from distensor_tui.palette import BACKGROUND, COLOURS, INK, PILLS
from distensor_tui.text import Line, Span, Tone, cells

CELL_W, CELL_H, FONT = 8.4, 19.0, 14
MARGIN, TITLE_H = 14.0, 34.0
FONTS = "'JetBrains Mono','Fira Code','SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
_WORDS = re.compile(r"\S+(?: \S+)*")
_CORNERS = dict(zip(UNICODE.corners, ((1, 1), (-1, 1), (1, -1), (-1, -1)), strict=True))
_SHAPES = {*UNICODE.corners, *UNICODE.spark, UNICODE.horizontal, UNICODE.vertical, UNICODE.bar, UNICODE.stitch}


def picture(lines: Sequence[Line], title: str) -> str:
    """The whole picture: window, title bar, text."""
    columns = max((sum(cells(span.text) for span in row) for row in lines), default=0)
    width = columns * CELL_W + 2 * MARGIN
    height = len(lines) * CELL_H + TITLE_H + MARGIN
    body = [part for y, row in enumerate(lines) for part in _row(row, TITLE_H + y * CELL_H)]
    return "\n".join([_head(width, height, title), *body, "</svg>", ""])


def _head(width: float, height: float, title: str) -> str:
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="17" r="5.5" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    classes = "".join(
        f".{tone.value}{{fill:{colour}{';font-weight:700' if bold else ''}}}"
        for tone, (colour, bold) in COLOURS.items()
    )
    pills = "".join(f".{tone.value}{{fill:{INK};font-weight:700}}" for tone in PILLS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height:.1f}" role="img" '
        f'aria-label="{escape(title)}"><style>text{{font-family:{FONTS};font-size:{FONT}px}}{classes}{pills}</style>'
        f'<rect width="{width:.1f}" height="{height:.1f}" rx="9" fill="{BACKGROUND}" stroke="#2a3744"/>'
        f'{dots}<text x="{width / 2:.1f}" y="22" text-anchor="middle" class="dim">{escape(title)}</text>'
    )


def _row(row: Line, top: float) -> Iterator[str]:
    x = MARGIN
    for span in row:
        size = cells(span.text) * CELL_W
        if span.tone in PILLS:
            yield _rect(x, top, size, CELL_H, PILLS[span.tone])
        yield from _span(span, x, top)
        x += size


def _span(span: Span, x: float, top: float) -> Iterator[str]:
    """Runs of one shape, and words between them."""
    for is_shape, run in groupby(span.text, lambda c: c in _SHAPES):
        text = "".join(run)
        if is_shape:
            yield from _shapes(text, span.tone, x, top)
        else:
            yield from _words(text, span.tone, x, top)
        x += cells(text) * CELL_W


def _words(text: str, tone: Tone, x: float, top: float) -> Iterator[str]:
    """Each group of words at its own place: renderers disagree about blanks, not about coordinates."""
    for found in _WORDS.finditer(text):
        at = x + cells(text[: found.start()]) * CELL_W
        size = cells(found[0]) * CELL_W
        yield (
            f'<text x="{at:.1f}" y="{top + 14:.1f}" textLength="{size:.1f}" lengthAdjust="spacingAndGlyphs" '
            f'class="{tone.value}">{escape(found[0])}</text>'
        )


def _shapes(text: str, tone: Tone, x: float, top: float) -> Iterator[str]:
    colour = COLOURS[tone][0] if tone in COLOURS else INK
    for character, run in groupby(text):
        count = len(list(run))
        yield _shape(character, count * CELL_W, colour, x, top)
        x += count * CELL_W


def _shape(character: str, size: float, colour: str, x: float, top: float) -> str:
    middle, end = top + CELL_H / 2, x + size
    if character in UNICODE.spark:
        height = CELL_H * (UNICODE.spark.index(character) + 1) / len(UNICODE.spark)
        return _rect(x, top + CELL_H - height, size + 0.2, height + 0.2, colour)
    if character == UNICODE.bar:
        return _rect(x, middle - 2, size, 4, colour)
    if character == UNICODE.stitch:
        return _stroke(f"M{x:.1f} {middle:.1f}H{end:.1f}", colour, 'stroke-width="4" stroke-dasharray="3 2"')
    if character == UNICODE.horizontal:
        return _rect(x, middle - 0.5, size, 1, colour)
    if character == UNICODE.vertical:
        return _rect(x + CELL_W / 2 - 0.5, top, 1, CELL_H, colour)
    return _corner(_CORNERS[character], colour, x, top)


def _corner(towards: tuple[int, int], colour: str, x: float, top: float) -> str:
    """A rounded corner from the middle of the cell to the right or left, and down or up."""
    right, down = towards
    cx, cy = x + CELL_W / 2, top + CELL_H / 2
    bend = f"Q{cx:.1f} {cy:.1f} {cx:.1f} {cy + down * 4:.1f}"
    path = f"M{cx + right * CELL_W / 2:.1f} {cy:.1f}{bend}V{cy + down * CELL_H / 2:.1f}"
    return _stroke(path, colour, 'stroke-width="1"')


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _stroke(path: str, colour: str, how: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" {how}/>'
