"""Time as an argument. `SystemClock` is the only place that reads the machine's clocks."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Protocol


class Clock(Protocol):
    """What code may ask of time. `distensor.testing.FakeClock` is the other implementation."""

    def now(self) -> float:
        """Seconds since the Unix epoch, UTC. May jump; only for showing and recording."""

    def monotonic(self) -> float:
        """Seconds that never go back; for durations and deadlines."""

    def since_boot(self) -> float:
        """Seconds that never go back and also count while the machine sleeps, where the system has such a clock.

        Elsewhere as `now`: then a sleep and a clock that was set look the same.
        """

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

    def since_boot(self) -> float:
        # On macOS `time.monotonic` stands still in sleep and CLOCK_MONOTONIC does not; on Linux both stand still.
        which = _COUNTS_SLEEP.get(sys.platform)
        return time.time() if which is None else time.clock_gettime(which)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


_COUNTS_SLEEP = {"linux": getattr(time, "CLOCK_BOOTTIME", 7), "darwin": getattr(time, "CLOCK_MONOTONIC", 6)}

SYSTEM_CLOCK: Clock = SystemClock()
