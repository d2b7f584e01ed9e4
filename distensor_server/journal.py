"""The events of this node: kept for who looks, logged, and told to who listens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from distensor.core.clock import Clock
from distensor.core.errors import StoreError
from distensor_server.eventlog import EventLog
from distensor_server.picture import LoggedEvent, Unwritten

log = logging.getLogger("distensor_server")

WRITTEN_WITHIN = 75.0
"""Seconds. The snapshot of the sections is written twice a minute: a disk that is full still says so within them."""


class Journal:
    """`on_shown` is called with each event that is shown; the log leaves out what repeats."""

    def __init__(self, clock: Clock, on_shown: Callable[[LoggedEvent], None]) -> None:
        self._clock = clock
        self._events = EventLog()
        self._unwritten: tuple[float, Unwritten] | None = None
        self._on_shown = on_shown

    def add(self, severity: str, source: str, text: str) -> None:
        """`severity` is info, warning or error."""
        event = LoggedEvent(at=round(self._clock.now(), 3), severity=severity, source=source, text=text)
        shown = self._events.add(event)
        if shown is not None:
            self._show(shown)

    def flush(self) -> None:
        """Show what was only counted and is due."""
        for shown in self._events.due(self._clock.now()):
            self._show(shown)

    def _show(self, shown: LoggedEvent) -> None:
        log.log(_LOG_LEVELS[shown.severity], "%s: %s", shown.source, shown.text)
        self._on_shown(shown)

    def guarded(self, write: Callable[[], None]) -> bool:
        """A full disk is shown and stops nothing: the work goes on, the hub has the books. False when it failed."""
        try:
            write()
        except StoreError as error:
            self.add("error", "supervisor", str(error))
            self._keep(error)
            return False
        return True

    def _keep(self, error: StoreError) -> None:
        cause = error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        failed = Unwritten(at=round(self._clock.now(), 3), text=str(error), errno=number)
        self._unwritten = (self._clock.monotonic(), failed)

    @property
    def unwritten(self) -> Unwritten | None:
        """The last write that failed; None when that is so long ago that others have been tried since."""
        if self._unwritten is None or self._clock.monotonic() - self._unwritten[0] >= WRITTEN_WITHIN:
            return None
        return self._unwritten[1]

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self._events)


_LOG_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
