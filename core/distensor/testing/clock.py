"""A clock that moves only when told, and whose wall time can jump."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable


class FakeClock:
    """A `distensor.core.clock.Clock` for tests. Safe to use from several threads and event loops.

    `advance` moves all clocks and wakes who has slept long enough; `suspend` is a machine asleep; `jump_wall` moves
    only what `now` says, as an operator or a time server does.
    """

    def __init__(self, *, now: float = 1_700_000_000.0, monotonic: float = 1000.0) -> None:
        self._now = now
        self._monotonic = monotonic
        self._slept = 0.0
        self._condition = threading.Condition()
        self._sleepers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        with self._condition:
            return self._now

    def monotonic(self) -> float:
        with self._condition:
            return self._monotonic

    def since_boot(self) -> float:
        with self._condition:
            return self._monotonic + self._slept

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"advance({seconds}): time does not go back; use jump_wall")
        with self._condition:
            self._now += seconds
            self._monotonic += seconds
            while self._sleepers and self._sleepers[0][0] <= self._monotonic:
                heapq.heappop(self._sleepers)[2]()
            self._condition.notify_all()

    def suspend(self, seconds: float) -> None:
        """Let the machine sleep: nobody wakes, and only monotonic time does not notice."""
        with self._condition:
            self._now += seconds
            self._slept += seconds

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back; durations do not notice."""
        with self._condition:
            self._now += seconds

    @property
    def sleepers(self) -> int:
        """How many threads and tasks sleep now."""
        with self._condition:
            return len(self._sleepers)

    def wait_for_sleepers(self, count: int, timeout: float = 5.0) -> None:
        """Block this thread until at least `count` others sleep.

        Raises:
            TimeoutError: they do not, within `timeout` real seconds.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: len(self._sleepers) >= count, timeout):
                raise TimeoutError(f"{len(self._sleepers)} sleepers after {timeout:g} s, expected {count}")

    def sleep(self, seconds: float) -> None:
        woken = threading.Event()
        if self._add(seconds, woken.set):
            woken.wait()

    async def sleep_async(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        if self._add(seconds, lambda: _wake(loop, woken)):
            await woken.wait()
        else:
            await asyncio.sleep(0)

    def _add(self, seconds: float, wake: Callable[[], None]) -> bool:
        if seconds <= 0:
            return False
        with self._condition:
            heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._numbers), wake))
            self._condition.notify_all()
        return True


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    if not loop.is_closed():  # a task that was cancelled in its sleep leaves its place behind
        loop.call_soon_threadsafe(woken.set)
