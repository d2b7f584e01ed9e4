"""'Not available' is a typed value with its reason, never -1, None or an exception."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unavailable:
    """A reading that cannot be had, and why."""

    reason: str

    def __bool__(self) -> bool:
        return False


Reading: TypeAlias = T | Unavailable


def value_or(reading: Reading[T], default: T) -> T:
    """The value, or `default` when the reading is not available."""
    return default if isinstance(reading, Unavailable) else reading
