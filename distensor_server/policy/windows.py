"""Weekly windows in local time, and when they next open or close, across midnight and changes of the clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache

from distensor.core.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
_HORIZON_HOURS = 9 * 24
"""A weekly plan repeats after seven days; a change of the clock may move what comes by an hour or a day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Open from minute `start` of each of `days` (0: Monday) to minute `end`; past midnight when `end` <= `start`."""

    days: frozenset[int]
    start: int
    end: int

    def holds(self, weekday: int, minute: int) -> bool:
        if self.start < self.end:
            return weekday in self.days and self.start <= minute < self.end
        return (weekday in self.days and minute >= self.start) or ((weekday - 1) % 7 in self.days and minute < self.end)


Windows = tuple[Window, ...]


def parse_windows(text: str) -> Windows:
    """'mon-fri 18:00-08:00; sat,sun' - days, times or both, windows between semicolons. No window: always open.

    Raises:
        ConfigError: something in it is neither days nor times.
    """
    return tuple(_window(part.split()) for part in text.split(";") if part.strip())


def _window(words: list[str]) -> Window:
    days, times = frozenset(range(7)), (0, DAY_MINUTES)
    if len(words) > 2:
        raise ConfigError(f"{' '.join(words)!r} is more than days and times; put ; between windows")
    if words and not words[0][0].isdigit():
        days = _days(words.pop(0))
    if words:
        times = _times(words[0])
    return Window(days=days, start=times[0], end=times[1])


def _days(word: str) -> frozenset[int]:
    found: set[int] = set()
    for part in word.lower().split(","):
        first, _, last = part.partition("-")
        if first not in DAYS or (last and last not in DAYS):
            raise ConfigError(f"{part!r} is no day; days are {', '.join(DAYS)}, or a range such as mon-fri")
        start, end = DAYS.index(first), DAYS.index(last or first)
        found |= {(start + i) % 7 for i in range((end - start) % 7 + 1)}
    return frozenset(found)


def _times(word: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", word)
    if not found:
        raise ConfigError(f"{word!r} is no pair of times such as 18:00-08:00")
    start, end = int(found[1]) * 60 + int(found[2]), int(found[3]) * 60 + int(found[4])
    if start >= DAY_MINUTES or end > DAY_MINUTES or int(found[2]) > 59 or int(found[4]) > 59:
        raise ConfigError(f"{word!r}: times go from 00:00 to 24:00")
    if start == end:
        raise ConfigError(f"{word!r} is an empty window; leave the times out for the whole day")
    return start, end


def is_open(windows: Windows, at: float, zone: tzinfo) -> bool:
    """Whether Unix time `at` lies in a window; without windows, always."""
    local = datetime.fromtimestamp(at, zone)
    minute = local.hour * 60 + local.minute
    return not windows or any(window.holds(local.weekday(), minute) for window in windows)


def next_change(windows: Windows, at: float, zone: tzinfo) -> float | None:
    """The next Unix time, to the minute, at which `is_open` changes; None: never."""
    return _next_change(windows, int(at // 60) * 60, zone)


@lru_cache(maxsize=64)
def _next_change(windows: Windows, minute: int, zone: tzinfo) -> float | None:
    """Cached by the minute: it is asked every other second.

    An hour in which nothing changes begins and ends with the same answer, unless a window or a gap lies inside it:
    so each hour is looked at by its own boundaries, every minute of it, and only hours that have one.
    """
    now = is_open(windows, minute, zone)
    marks = {window.start % DAY_MINUTES for window in windows} | {window.end % DAY_MINUTES for window in windows}
    for hour in range(_HORIZON_HOURS):
        first = minute + hour * 3600
        if _is_quiet(first, zone, marks) and is_open(windows, first + 3600, zone) is now:
            continue
        for candidate in range(first + 60, first + 3660, 60):
            if is_open(windows, candidate, zone) is not now:
                return float(candidate)
    return None


def _is_quiet(first: int, zone: tzinfo, marks: set[int]) -> bool:
    """Whether the local hour from `first` on holds no boundary and no change of the clock."""
    begin, end = datetime.fromtimestamp(first, zone), datetime.fromtimestamp(first + 3600, zone)
    if begin.utcoffset() != end.utcoffset():
        return False
    start = begin.hour * 60 + begin.minute
    return not any(0 <= (mark - start) % DAY_MINUTES <= 60 for mark in marks)


def next_midnight(at: float, zone: tzinfo) -> float:
    """The Unix time at which the local day of `at` ends."""
    tomorrow = datetime.fromtimestamp(at, zone).date() + timedelta(days=1)
    return datetime(tomorrow.year, tomorrow.month, tomorrow.day, tzinfo=zone).timestamp()


def next_month(at: float, zone: tzinfo) -> float:
    """The Unix time at which the local month of `at` ends."""
    today = datetime.fromtimestamp(at, zone).date()
    year, month = (today.year + 1, 1) if today.month == 12 else (today.year, today.month + 1)
    return datetime(year, month, 1, tzinfo=zone).timestamp()


def day_of(at: float, zone: tzinfo) -> str:
    """The local date, as 2026-12-01."""
    return datetime.fromtimestamp(at, zone).date().isoformat()
