"""Time as an argument. `SystemClock` is the only place that reads the machine's clocks."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What code may ask of time. `distensor.testing.FakeClock` is the other implementation."""

    def now(self) -> float:
        """Seconds since the Unix epoch, UTC. May jump; only for showing and recording."""

    def monotonic(self) -> float:
        """Seconds that never go back; for durations and deadlines."""

    def sleep(self, seconds: float) -> None:
        """Block this thread."""

    async def sleep_async(self, seconds: float) -> None:
        """Suspend this task."""


class SystemClock:
    """The clocks of the machine."""

    __slots__ = ()

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()
