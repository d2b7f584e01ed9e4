"""Waiting times between attempts: quick at first, then doubling, spread so that a herd does not march in step."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_SECONDS = 0.2
CAP_SECONDS = 15.0


class Backoff:
    """Delays of 0.2, 0.4, 0.8 ... seconds up to the cap, each shortened by up to half at random."""

    __slots__ = ("_attempts", "_cap", "_first", "_random")

    def __init__(
        self,
        *,
        first: float = FIRST_SECONDS,
        cap: float = CAP_SECONDS,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._cap = cap
        self._random = uniform
        self._attempts = 0

    def next_delay(self) -> float:
        """The next delay in seconds."""
        whole = min(self._cap, self._first * float(1 << min(self._attempts, 32)))
        self._attempts += 1
        return whole * (0.5 + 0.5 * self._random())

    def reset(self) -> None:
        self._attempts = 0
