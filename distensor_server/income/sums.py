"""What the rows of the statement and of the energy add up to: by day, job and device, and over the last days. Pure.

Days are the owner's calendar days. A row belongs to the day in which its hour begins, and to no other, so that the sums
of any two groupings are equal. What the hub has confirmed since the last statement counts into the present hour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from distensor.core.ids import DeviceId, Epoch, JobId, Rank
from distensor.core.statement import HOUR_SECONDS, RowKey, StatementRow, hour_of
from distensor_server.income.values import Energy

HOURS_KEPT = 48
DAYS_KEPT = 400
LATELY = JobId("")
"""The job of what was confirmed since the last statement: which one it was is not known yet."""

DayOf = Callable[[float], str]
"""The owner's calendar day at a Unix time, '2026-01-31'."""
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Credits and energy together. `unmeasured_ms` is work of which the energy is not known."""

    units: int = 0
    micro: int = 0
    millijoules: int = 0
    fixed_millijoules: int = 0
    """The part of `millijoules` that comes from the owner's figure and not from a meter."""
    measured_ms: int = 0
    work_ms: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(
            units=self.units + other.units,
            micro=self.micro + other.micro,
            millijoules=self.millijoules + other.millijoules,
            fixed_millijoules=self.fixed_millijoules + other.fixed_millijoules,
            measured_ms=self.measured_ms + other.measured_ms,
            work_ms=self.work_ms + other.work_ms,
        )

    @property
    def unmeasured_ms(self) -> int:
        return self.work_ms - self.measured_ms


def with_tail(
    rows: Sequence[StatementRow], confirmed_micro: int, confirmed_units: int, now: float
) -> list[StatementRow]:
    """The rows and, where the hub has confirmed more by now, one more, so that they add up to what it confirmed."""
    micro = confirmed_micro - sum(row.micro for row in rows)
    units = confirmed_units - sum(row.units for row in rows)
    if micro <= 0 or units <= 0:
        return list(rows)
    key = RowKey(hour=hour_of(now), job_id=LATELY, epoch=Epoch(0), rank=Rank(0))
    return [*rows, StatementRow(key=key, device_id=DeviceId(""), units=units, micro=micro)]


def credited(row: StatementRow) -> Sum:
    return Sum(units=row.units, micro=row.micro)


def spent(energy: Energy) -> Sum:
    fixed = energy.millijoules if energy.source == "fixed" else 0
    return Sum(
        millijoules=energy.millijoules,
        fixed_millijoules=fixed,
        measured_ms=energy.measured_ms,
        work_ms=energy.work_ms,
    )


def grouped(parts: Iterable[tuple[K, Sum]]) -> dict[K, Sum]:
    """The sum of each group, in the order in which groups come first."""
    sums: dict[K, Sum] = defaultdict(Sum)
    for key, part in parts:
        sums[key] = sums[key] + part
    return dict(sums)


class Calendar:
    """The owner's days of hours; each is worked out once."""

    def __init__(self, day_of: DayOf) -> None:
        self._day_of = day_of
        self._days: dict[int, str] = {}

    def day(self, hour: int) -> str:
        """The day of an hour since 1970; '' for hour 0, which is from before days were kept."""
        if hour <= 0:
            return ""
        if hour not in self._days:
            self._days[hour] = self._day_of(hour * HOUR_SECONDS)
        return self._days[hour]

    def forget(self) -> None:
        """The time zone may have changed."""
        self._days.clear()


def by_day(rows: Iterable[StatementRow], energy: Iterable[Energy], calendar: Calendar) -> dict[str, Sum]:
    parts = [(calendar.day(row.key.hour), credited(row)) for row in rows]
    parts += [(calendar.day(one.hour), spent(one)) for one in energy]
    return dict(sorted(grouped(parts).items()))


def by_job(rows: Iterable[StatementRow]) -> dict[str, Sum]:
    """Energy is not divided among jobs: a device's meter does not know them."""
    return grouped((str(row.key.job_id), credited(row)) for row in rows)


def by_device(rows: Iterable[StatementRow], energy: Iterable[Energy]) -> dict[str, Sum]:
    parts = [(str(row.device_id), credited(row)) for row in rows]
    return grouped([*parts, *((one.device, spent(one)) for one in energy)])


def last_hours(rows: Iterable[StatementRow], now: float, hours: int = HOURS_KEPT) -> list[int]:
    """Micro-credits of each of the last hours, the present one at the end."""
    present = hour_of(now)
    found = [0] * hours
    for row in rows:
        place = row.key.hour - present + hours - 1
        if 0 <= place < hours:
            found[place] += row.micro
    return found


def last_days(days: Mapping[str, Sum], recent: Sequence[str]) -> Sum:
    """The sum over the days named."""
    return sum((days[day] for day in recent if day in days), Sum())


def recent_days(now: float, count: int, day_of: DayOf) -> list[str]:
    """Today and the days before, oldest first. Steps of six hours: a clock change skips no day."""
    today = day_of(now)
    found = [today]
    at = now
    while len(found) < count:
        at -= HOUR_SECONDS * 6
        day = day_of(at)
        if day != found[-1]:
            found.append(day)
    return found[::-1]


def projection(days: Mapping[str, Sum], recent: Sequence[str], length: int = 30) -> tuple[int, int] | None:
    """(micro-credits of `length` days like those observed, how many days that is from).

    Observed are the whole days since the first that earned anything, today left out; idle days count. None without one.
    """
    whole = [day for day in recent[:-1] if any(known and known <= day and one.micro for known, one in days.items())]
    if not whole:
        return None
    return last_days(days, whole).micro * length // len(whole), len(whole)


def hours_together(hours: Iterable[int], now: float, calendar: Calendar) -> dict[int, int]:
    """Where each hour is kept: for two days as itself, then under the first known hour of its day, in the end as 0."""
    present = hour_of(now)
    first: dict[str, int] = {}
    moved: dict[int, int] = {}
    for hour in sorted(set(hours)):
        if hour > present - HOURS_KEPT or hour == 0:
            continue
        if hour < present - DAYS_KEPT * 24:
            moved[hour] = 0
        else:
            moved[hour] = first.setdefault(calendar.day(hour), hour)
    return {old: new for old, new in moved.items() if old != new}
