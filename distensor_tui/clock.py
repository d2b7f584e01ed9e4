"""Time as an argument: the only place of this package that reads the machine's clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo

Now = Callable[[], float]
"""Seconds since the Unix epoch."""


def system_now() -> float:
    """The wall clock; only for showing ages and hours."""
    return time.time()


def system_monotonic() -> float:
    """Seconds that never go back; for deadlines."""
    return time.monotonic()


def local(at: float, zone: tzinfo | None) -> datetime:
    """A moment in the given zone, or in the machine's own."""
    return datetime.fromtimestamp(at, tz=UTC).astimezone(zone)
