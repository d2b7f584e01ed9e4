"""How hard this worker works: the share of its time in which it computes, and the caps of its traffic.

The owner's limits reach it as lines of the supervisor, also in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distensor.core.clock import Clock
from distensor.core.numbers import is_finite

if TYPE_CHECKING:
    from distensor.transport import DataPlane

LEAST_DUTY = 0.05
_ENOUGH = 1e-6
"""Seconds that are not worth a sleep."""
_NAP = 0.2
"""The longest single sleep: a change of mind is noticed after that."""


class Pacer:
    """Told by the supervisor's lines (`obey`, from any thread); asked by whoever computes (`rest`)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._duty = 1.0
        self._rates: tuple[float | None, float | None] = (None, None)
        self._plane: DataPlane | None = None

    @property
    def duty(self) -> float:
        return self._duty

    def obey(self, message: Mapping[str, Any]) -> None:
        """A line {"duty": 0.5, "send_rate": bytes per second or null, "receive_rate": ...}; a wrong value changes
        nothing: the supervisor is of the same machine, and a step in hand is worth more than a misread cap.
        """
        duty = message.get("duty", 1.0)
        if is_finite(duty) and 0 < duty <= 1:
            self._duty = max(LEAST_DUTY, float(duty))
        self._rates = (_rate(message.get("send_rate")), _rate(message.get("receive_rate")))
        self._apply()

    def attach(self, plane: DataPlane) -> None:
        """The caps hold for this plane from now on."""
        self._plane = plane
        self._apply()

    def _apply(self) -> None:
        if self._plane is not None:
            self._plane.limit_rates(send=self._rates[0], receive=self._rates[1])

    def rest(self, worked: float) -> None:
        """Sleep so that `worked` seconds of computing are the duty's share of the time; never at full duty."""
        started = self._clock.monotonic()
        while self._duty < 1.0:
            left = worked * (1.0 / self._duty - 1.0) - (self._clock.monotonic() - started)
            if left <= _ENOUGH:
                break
            self._clock.sleep(min(left, _NAP))


def _rate(value: object) -> float | None:
    return float(value) if is_finite(value) and value > 0 else None
