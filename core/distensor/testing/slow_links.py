"""A data plane whose messages take their time, so that slow links can be tried on one machine.

Each direction to a peer carries one message after the other at `rate` bytes a second; a message arrives `latency`
seconds after it has left. Nothing else about the plane changes, and the sender never waits.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from distensor.core.clock import Clock
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.transport import DataPlane, Tag
from distensor.transport.types import Buffer


class SlowHandle:
    """Done once the message has been handed to the real plane."""

    def __init__(self) -> None:
        self._delivered = threading.Event()

    def deliver(self) -> None:
        self._delivered.set()

    def wait(self, timeout: float | None = None) -> None:
        self._delivered.wait(timeout)


class SlowPlane:
    """`plane`, and what `seconds(peer, bytes)` says a message takes. Close it before the plane."""

    def __init__(self, plane: DataPlane, seconds: Callable[[int, int], LinkSeconds], clock: Clock) -> None:
        self._plane = plane
        self._seconds = seconds
        self._clock = clock
        self._free: dict[int, float] = {}
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="slow-links", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def send(self, peer: int, tag: Tag, header: bytes = b"", buffers: Sequence[Buffer] = ()) -> SlowHandle:
        handle = SlowHandle()
        size = len(header) + sum(map(len, buffers))

        def deliver() -> None:
            self._plane.send(peer, tag, header, buffers)
            handle.deliver()

        with self._changed:
            link = self._seconds(peer, size)
            left = max(self._clock.monotonic(), self._free.get(peer, 0.0)) + link.occupied
            self._free[peer] = left
            heapq.heappush(self._waiting, (left + link.latency, next(self._count), deliver))
            self._changed.notify()
        return handle

    def close(self) -> None:
        """Messages that have not arrived are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (deliver := self._next()) is not None:
            deliver()

    def _next(self) -> Callable[[], None] | None:
        """The next message, at its time; None when closed."""
        with self._changed:
            while not self._closed:
                until = self._waiting[0][0] - self._clock.monotonic() if self._waiting else None
                if until is not None and until <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(until)
            return None
