"""Ask the hub for the account and lay it beside ours. Nothing here is in the way of a step: it runs beside the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distensor.core.clock import Clock
from distensor.core.control import Earnings, Unit
from distensor.core.statement import (
    HubUnit,
    NodeMoney,
    RowKey,
    Statement,
    StatementQuery,
    StatementRow,
    UnitsPage,
    UnitsQuery,
)
from distensor_server.income.book import AccountBook
from distensor_server.income.values import RankLine

RECENT_SECONDS = 3600.0
"""Ranks that claimed something so recently are compared each time; older open units once an hour."""
MOST_PAGES = 500
"""Of one answer: a hub that always says 'more' must not keep us for ever. 500 pages are a million rows."""


class AccountSource(Protocol):
    """What is asked of the link."""

    async def statement(self, query: StatementQuery) -> Statement: ...

    async def units(self, query: UnitsQuery) -> UnitsPage: ...


@dataclass(kw_only=True, slots=True)
class Synchroniser:
    """`claim_again` gets our units that the hub never heard of: it counts a unit once, however often it comes."""

    book: AccountBook
    source: AccountSource
    clock: Clock
    claim_again: Callable[[Unit], None]
    _all_at: float | None = None
    _seen: dict[RankLine, tuple[int, int]] = field(default_factory=dict)
    """Sums that differed when it ran last."""
    _searched: dict[RankLine, tuple[int, int]] = field(default_factory=dict)
    lasting: int = 0
    """Ranks whose sums differ and did not move since the last run: no lag, a difference."""
    money: NodeMoney | None = None
    """Where the credits are, as the hub said last; None until it has."""

    async def run(self) -> Earnings:
        """Compare once; the hub's own sums at the moment of its statement.

        Raises:
            ControlError: the hub is away or does not know the question. What was compared until then stays.
            StoreError: the account cannot be written.
        """
        earnings = await self._statement()
        await self._open_units()
        await self._differences()
        return earnings

    async def _statement(self) -> Earnings:
        """Fetch what may be new; everything when that does not add up (the hub's clock or its books went back)."""
        since = max(0, self.book.last_hour() - 1)
        earnings, rows = await self._pages(since)
        self.book.replace_statement(since, rows)
        if since and self._total() != earnings.confirmed_micro:
            earnings, rows = await self._pages(0)
            self.book.replace_statement(0, rows)
        return earnings

    def _total(self) -> int:
        return sum(row.micro for row in self.book.statement())

    async def _pages(self, since: int) -> tuple[Earnings, list[StatementRow]]:
        rows: list[StatementRow] = []
        after: RowKey | None = None
        earnings = Earnings()
        for _ in range(MOST_PAGES):
            page = await self.source.statement(StatementQuery(since_hour=since, after=after))
            rows += page.rows
            earnings, self.money = page.earnings, page.money
            if not page.more or not page.rows:
                break
            after = page.rows[-1].key
        return earnings, rows

    async def _open_units(self) -> None:
        now = self.clock.monotonic()
        everything = self._all_at is None or now - self._all_at >= RECENT_SECONDS
        if everything:
            self._all_at = now
        since = 0 if everything else int(self.clock.now() - RECENT_SECONDS)
        for line, steps in self.book.open_steps(since).items():
            await self._steps(line, steps)

    async def _steps(self, line: RankLine, steps: Sequence[int]) -> None:
        """Compare these steps, leaving out what lies between them where it is long."""
        place = 0
        while place < len(steps):
            first = steps[place]
            page = await self.source.units(_query(line, first))
            last = page.units[-1].key.step if page.more and page.units else None
            self._compare(line, page.units, first, last)
            if last is None:
                return
            while place < len(steps) and steps[place] <= last:
                place += 1

    async def _differences(self) -> None:
        """Look once for the units behind sums that differ and stay so; those that move are only of another moment."""
        differ = self.book.lines_that_differ()
        self._searched = {line: pair for line, pair in self._searched.items() if differ.get(line) == pair}
        for line, pair in differ.items():
            if line not in self._searched and self._seen.get(line, pair) == pair:
                await self._all_steps(line)
                self._searched[line] = self.book.lines_that_differ().get(line, pair)
        after = self.book.lines_that_differ()
        self.lasting = sum(self._seen.get(line) == pair for line, pair in after.items())
        self._seen = after

    async def _all_steps(self, line: RankLine) -> None:
        first = self.book.first_single(line)
        for _ in range(MOST_PAGES):
            page = await self.source.units(_query(line, first))
            last = page.units[-1].key.step if page.more and page.units else None
            self._compare(line, page.units, first, last)
            if last is None:
                return
            first = last + 1

    def _compare(self, line: RankLine, units: Sequence[HubUnit], first: int, last: int | None) -> None:
        for lost in self.book.compare(line, units, first=first, last=last, now=self.clock.now()):
            self.claim_again(lost)


def _query(line: RankLine, first: int) -> UnitsQuery:
    return UnitsQuery(job_id=line.job_id, epoch=line.epoch, rank=line.rank, from_step=first)
