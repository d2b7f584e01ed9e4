"""The energy of own work: power readings integrated over the time in which a worker of ours ran on the device. Pure.

Between two readings the mean of both counts (the trapezoidal rule). Time without a reading at either end, and gaps in
which nothing was sampled, are counted as time and not as energy: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LONGEST_GAP_SECONDS = 10.0
"""Readings come every two seconds; over a longer gap nobody knows what the device did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What one device used between two samples, in whole milliseconds and millijoules. `measured_ms` <= `work_ms`."""

    work_ms: int
    measured_ms: int
    millijoules: int


class EnergyMeter:
    """`sample` takes monotonic seconds and, for each device that works for us, its watts or None where unknown."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._watts: Mapping[str, float | None] = {}
        self._left: dict[str, tuple[float, float, float]] = {}
        """What was too small for a whole millisecond or millijoule, so that nothing is lost by rounding."""

    def interrupt(self) -> None:
        """The machine slept: what lies between the last sample and the next is not work."""
        self._at, self._watts = None, {}

    def sample(self, at: float, watts: Mapping[str, float | None]) -> dict[str, Used]:
        """What was used since the last sample by devices that worked at both."""
        before_at, before = self._at, self._watts
        self._at, self._watts = at, dict(watts)
        if before_at is None or at <= before_at:
            return {}
        return {
            device: self._between(device, at - before_at, before[device], now)
            for device, now in watts.items()
            if device in before
        }

    def _between(self, device: str, seconds: float, first: float | None, last: float | None) -> Used:
        known = first is not None and last is not None and seconds <= LONGEST_GAP_SECONDS
        joules = (first + last) / 2 * seconds if known and first is not None and last is not None else 0.0
        old = self._left.get(device, (0.0, 0.0, 0.0))
        exact = [
            kept + 1000.0 * new for kept, new in zip(old, (seconds, seconds if known else 0.0, joules), strict=True)
        ]
        whole = [int(value) for value in exact]
        self._left[device] = (exact[0] - whole[0], exact[1] - whole[1], exact[2] - whole[2])
        return Used(work_ms=whole[0], measured_ms=whole[1], millijoules=whole[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Tariff:
    """What the owner pays and gets: integers in millionths. `credits_micro` is micro-credits for one unit of money."""

    price_micro: int
    """For one kWh, in millionths of the currency; 0: not given."""
    currency: str = ""
    credits_micro: int = 0
    """0: no rate was given, so credits and money are not mixed."""


MILLIJOULES_PER_KWH = 3_600_000_000


def cost_micro(millijoules: int, tariff: Tariff) -> int:
    """The price of the energy in millionths of the currency, rounded up: what is spent is not made to look smaller."""
    return -(-millijoules * tariff.price_micro // MILLIJOULES_PER_KWH)


def worth_micro(earned_micro: int, tariff: Tariff) -> int | None:
    """The same credits in millionths of the currency, rounded down; None without a rate."""
    if tariff.credits_micro <= 0:
        return None
    return earned_micro * 1_000_000 // tariff.credits_micro


def net_micro(earned_micro: int, millijoules: int, tariff: Tariff) -> int | None:
    """Worth less cost, in millionths of the currency; None while rate or price are missing."""
    worth = worth_micro(earned_micro, tariff)
    if worth is None or tariff.price_micro <= 0:
        return None
    return worth - cost_micro(millijoules, tariff)
