"""Plain text tables for terminals, and sizes as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_STEP = 1024.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, everything else to the left.

    >>> print(table(["name", "size"], [["a", 1], ["long", 20]]))
    name  size
    a        1
    long    20
    """
    cells = [list(headers), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    right = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in range(len(headers))]
    return "\n".join(_line(row, widths, right) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(row, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def bytes_text(count: float) -> str:
    """A number of bytes with about three digits.

    >>> bytes_text(512), bytes_text(1536), bytes_text(300 * 2**30)
    ('512 B', '1.50 KiB', '300 GiB')
    """
    unit = 0
    while abs(count) >= _STEP and unit < len(_UNITS) - 1:
        count /= _STEP
        unit += 1
    return f"{_digits(count) if unit else round(count)} {_UNITS[unit]}"


def count_text(count: float) -> str:
    """A large number with three digits and a letter.

    >>> count_text(950), count_text(1_234_567), count_text(7e9)
    ('950', '1.23M', '7.00G')
    """
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{_digits(count / limit)}{letter}"
    return f"{count:.0f}"


def _digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"
