"""The newest events, bounded in number and in rate: a worker in trouble must not push everything else out. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from distensor_server.durations import spoken
from distensor_server.picture import LoggedEvent

MAX_EVENTS = 200
MAX_REPEATS = 400
LONGEST_WAIT = 600.0


@dataclass(slots=True)
class _Repeat:
    """An event that may come again."""

    event: LoggedEvent
    shown_at: float
    last_at: float
    wait: float
    count: int = 0
    """How often it came since it was shown."""


class EventLog:
    """Keeps what is shown.

    The same event again is counted, and shown with its number after 10 s, then after a minute, then every ten minutes.
    A source that has more than `burst` different ones in `quiet` seconds is cut short, and the log says so once.
    """

    def __init__(self, *, quiet: float = 10.0, burst: int = 30) -> None:
        self._events: deque[LoggedEvent] = deque(maxlen=MAX_EVENTS)
        self._quiet = quiet
        self._burst = burst
        self._repeats: dict[tuple[str, str], _Repeat] = {}

    def add(self, event: LoggedEvent) -> LoggedEvent | None:
        """What is to be shown of it: the event, or how often it came, or that there are too many, or nothing."""
        known = self._repeats.get((event.source, event.text))
        if known is not None and 0 <= event.at - known.last_at < LONGEST_WAIT:
            known.count += 1
            known.event, known.last_at = event, event.at
            return self._tell(known, event.at) if event.at - known.shown_at >= known.wait else None
        return self._new(event)

    def due(self, now: float) -> list[LoggedEvent]:
        """Counts that are to be shown although nothing new came; what has been quiet for long is forgotten."""
        shown = [
            self._tell(repeat, now)
            for repeat in self._repeats.values()
            if repeat.count and now - repeat.shown_at >= repeat.wait
        ]
        self._repeats = {
            key: repeat for key, repeat in self._repeats.items() if 0 <= now - repeat.last_at < LONGEST_WAIT
        }
        return shown

    def _tell(self, repeat: _Repeat, now: float) -> LoggedEvent:
        count, passed = repeat.count, now - repeat.shown_at
        repeat.count, repeat.shown_at, repeat.wait = 0, now, min(repeat.wait * 6, LONGEST_WAIT)
        told = repeat.event
        if count > 1:
            told = replace(told, text=f"{told.text} ({count} times in {spoken(passed)})")
        self._events.append(told)
        return told

    def _new(self, event: LoggedEvent) -> LoggedEvent | None:
        count = sum(
            repeat.event.source == event.source and 0 <= event.at - repeat.shown_at < self._quiet
            for repeat in self._repeats.values()
        )
        if count > self._burst:
            return None
        if count == self._burst:
            words = f"over {self._burst} events in {self._quiet:g} s: the others are not shown"
            event = replace(event, severity="warning", text=words)
        self._forget_one_too_many()
        self._repeats[event.source, event.text] = _Repeat(
            event=event, shown_at=event.at, last_at=event.at, wait=self._quiet
        )
        self._events.append(event)
        return event

    def _forget_one_too_many(self) -> None:
        """The oldest that has nothing to tell: jobs that come and go name a new worker each time."""
        if len(self._repeats) >= MAX_REPEATS:
            silent = (key for key, repeat in self._repeats.items() if not repeat.count)
            del self._repeats[next(silent, next(iter(self._repeats)))]

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self._events)
