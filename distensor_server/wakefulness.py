"""Notices that the machine slept, that this process was stopped, and that somebody set the clock.

Three clocks are compared between two ticks: monotonic time stands still while the machine sleeps, time since boot does
not, and only wall time can be set. A sleep must not look like a fault: nothing that was lost meanwhile counts as a
failure, and hub and devices are asked again at once instead of after the next long wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from distensor.core.clock import Clock
from distensor_server.durations import spoken
from distensor_server.feature import Feature
from distensor_server.node import Node
from distensor_server.picture import Picture

SLEPT_SECONDS = 5.0
"""Shorter ones are told by nobody and break nothing."""
STOPPED_SECONDS = 15.0
"""Between two ticks that should be two seconds apart; a busy machine is late by less."""
SET_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One reading of all three clocks, in seconds."""

    monotonic: float
    boot: float
    wall: float

    @classmethod
    def of(cls, clock: Clock) -> Moment:
        return cls(monotonic=clock.monotonic(), boot=clock.since_boot(), wall=clock.now())


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """What happened between two moments; zero where nothing did."""

    slept: float = 0.0
    stopped: float = 0.0
    clock_set: float = 0.0

    @property
    def away(self) -> float:
        return self.slept + self.stopped


def compare(before: Moment, after: Moment) -> Between:
    """Pure. A machine without a clock that counts sleep shows a sleep as a clock that was set forward."""
    ran = after.monotonic - before.monotonic
    passed = after.boot - before.boot
    jumped = after.wall - before.wall - passed
    slept = passed - ran
    return Between(
        slept=slept if slept >= SLEPT_SECONDS else 0.0,
        stopped=ran if ran >= STOPPED_SECONDS else 0.0,
        clock_set=jumped if abs(jumped) >= SET_SECONDS else 0.0,
    )


class Wakefulness(Feature):
    """Compares the clocks every two seconds and tells the node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._last = Moment.of(node.clock)

    def on_tick(self, picture: Picture) -> None:
        now = Moment.of(self._node.clock)
        between = compare(self._last, now)
        self._last = now
        if between.clock_set:
            word = "forward" if between.clock_set > 0 else "back"
            text = f"the clock was set {word} by {spoken(abs(between.clock_set))}"
            self._node.clock_was_set(between.clock_set)
            self._node.journal.add("info", "supervisor", text)
        if between.away:
            word = f"slept {spoken(between.slept)}" if between.slept else f"was stopped for {spoken(between.stopped)}"
            text = f"{word}: looking for devices and hub again"
            self._node.woke()
            self._node.journal.add("info", "supervisor", text)
