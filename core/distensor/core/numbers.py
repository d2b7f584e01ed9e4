"""Numbers that somebody else wrote."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a whole or real number that a float can hold: JSON also has whole numbers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
