"""Every mouse action has a key: which key a click on a line stands for."""

from __future__ import annotations

from distensor_tui.text import Line, Tone, cells

_NEIGHBOURS = {Tone.TITLE: (1,), Tone.BORDER: ()}
"""Where the key stands from the clicked part: before its label, but behind a panel's title."""
_NAMES = {"?": "question_mark", "Esc": "escape", "Enter": "enter", "/": "slash", ":": "colon"}


def key_at(row: Line, x: int) -> str | None:
    """The key whose name or label is under the cell: 'p pause', or a panel's title 'Jobs 2'."""
    index = _span_at(row, x)
    if index is None or not row[index].text.strip():
        return None
    for place in (index + step for step in _NEIGHBOURS.get(row[index].tone, (0, -1))):
        if 0 <= place < len(row) and row[place].tone is Tone.KEY:
            return _key(row[place].text.strip())
    return None


def _span_at(row: Line, x: int) -> int | None:
    position = 0
    for i, span in enumerate(row):
        position += cells(span.text)
        if x < position:
            return i
    return None


def _key(text: str) -> str | None:
    text = _NAMES.get(text, text)
    return text if len(text) == 1 or text in _NAMES.values() else None
