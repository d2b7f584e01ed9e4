"""What this node has claimed and what the hub has confirmed, kept across restarts."""

from __future__ import annotations

from collections.abc import Iterator

from distensor.core.clock import Clock
from distensor.core.control import Earnings, Unit
from distensor_server.receipts import ReceiptLog, Totals, load_totals, local_day, save_totals
from distensor_server.statedir import StateDirectory


class Books:
    """Receipts, totals and the newest earnings. Methods that write may raise StoreError."""

    def __init__(self, state: StateDirectory, clock: Clock) -> None:
        self._path = state.totals
        self._clock = clock
        self._receipts = ReceiptLog(state.receipts)
        self._totals = Totals()
        self._saved = self._totals
        self.earnings = Earnings()
        self.confirmed_at: float | None = None

    def open(self) -> None:
        self._totals = self._saved = load_totals(self._path)
        # Until the hub speaks, what it last confirmed is the best that is known; `confirmed_at` says that it is old.
        self.earnings = Earnings(confirmed_micro=self._totals.last_micro)

    def since(self, moment: float) -> Iterator[Unit]:
        """The claims from `moment` to now, read as they are asked for."""
        return self._receipts.since(moment, self._clock.now())

    def claimed(self, unit: Unit) -> None:
        now = self._clock.now()
        self._totals = self._totals.claimed(local_day(now))
        self._receipts.append(unit, now)

    def confirmed(self, earnings: Earnings) -> None:
        now = self._clock.now()
        self.earnings, self.confirmed_at = earnings, round(now)
        self._totals = self._totals.confirmed(local_day(now), earnings)

    @property
    def today_micro(self) -> int:
        return self._totals.on_day(local_day(self._clock.now())).today_micro

    def save(self) -> None:
        """Write the totals if they changed."""
        if self._totals != self._saved:
            save_totals(self._path, self._totals)
            self._saved = self._totals

    def close(self) -> None:
        self._receipts.close()
