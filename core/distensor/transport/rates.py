"""A cap on bytes per second, shared by all connections of a data plane.

Each piece of traffic is booked on a line of time at the cap's speed, and waits until the line has reached it (the
generic cell rate algorithm, ITU-T I.371). Idle time is credited up to a short burst, so that over any stretch of time
no more passes than the cap allows for it and the burst.
"""

from __future__ import annotations

import threading

from distensor.core.clock import Clock

BURST_SECONDS = 0.1
"""Of idle time that may be caught up with."""
_LONGEST_PIECE = 1 << 16
_SHORTEST_PIECE = 1 << 9
_PIECE_SECONDS = 0.05
"""A piece takes at most so long: with twenty peers at once, each of them hears of us every second."""
_ENOUGH = 1e-6
"""Seconds that are not worth a sleep."""
_NAP = 0.1
"""The longest single sleep: a cap that was lifted is noticed after that."""


class RateLimit:
    """One direction. Any thread may use it; without a rate it costs a comparison."""

    __slots__ = ("_clock", "_free_at", "_lock", "_rate")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._free_at = 0.0

    @property
    def active(self) -> bool:
        return self._rate is not None

    def set_rate(self, rate: float | None) -> None:
        """Bytes per second from now on, above 0; None for no cap."""
        with self._lock:
            if rate != self._rate:
                self._rate = rate
                self._free_at = self._clock.monotonic()

    def piece(self, size: int) -> int:
        """How much of `size` bytes to move at once."""
        rate = self._rate
        if rate is None:
            return size
        return min(size, _LONGEST_PIECE, max(_SHORTEST_PIECE, int(rate * _PIECE_SECONDS)))

    def spend(self, count: int) -> None:
        """Book `count` bytes and wait until it is their time."""
        due = self.book(count)
        while due is not None and self._rate is not None:
            left = due - self._clock.monotonic()
            if left <= _ENOUGH:
                return
            self._clock.sleep(min(left, _NAP))

    def book(self, count: int) -> float | None:
        """Enter `count` bytes; the monotonic time at which they have been paid for, None without a cap."""
        with self._lock:
            if self._rate is None:
                return None
            earliest = self._clock.monotonic() - BURST_SECONDS
            self._free_at = max(self._free_at, earliest) + count / self._rate
            return self._free_at
