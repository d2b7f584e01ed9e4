"""Lengths of time as words."""

from __future__ import annotations


def spoken(seconds: float) -> str:
    """'40 s', '12 min', '3 h 4 min', '2 d 5 h'."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, rest = divmod(hours, 24)
    return f"{days} d {rest} h" if rest else f"{days} d"
