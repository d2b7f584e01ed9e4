"""The answers to `statement` and `units` of the local protocol. Parameters come from outside and are checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from distensor.core.errors import StoreError
from distensor_server.income.book import AccountBook
from distensor_server.income.section import Account, Section, as_json, ledger, unit_json
from distensor_server.income.standing import Standing
from distensor_server.income.sums import Calendar, Sum, by_day, by_device, by_job, with_tail
from distensor_server.income.values import OwnUnit
from distensor_server.localserver import RequestError

T = TypeVar("T")

MOST_UNITS = 500
GROUPINGS = ("day", "job", "device")
_DAY = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])")


def answered(work: Callable[[], T]) -> T:
    """`work`, with an account that cannot be read as a refusal of this one request."""
    try:
        return work()
    except StoreError as error:
        raise RequestError(code="store", message=str(error), fix="see `distensor doctor`") from error


def statement_rows(params: Mapping[str, Any], account: Account, calendar: Calendar) -> Section:
    """Rows by day, job or device, and their total; without `since` the total is all that the hub confirmed."""
    by, since = params.get("by", "day"), params.get("since", "")
    if by not in GROUPINGS:
        raise _bad(f"by = {by!r:.40}", f"use one of {', '.join(GROUPINGS)}")
    if not isinstance(since, str) or (since and not _DAY.fullmatch(since)):
        raise _bad(f"since = {since!r:.40}", "give a day such as 2026-01-31")
    earnings = account.earnings
    rows = with_tail(account.rows, earnings.confirmed_micro, earnings.confirmed_units, account.now)
    rows = [row for row in rows if calendar.day(row.key.hour) >= since]
    energy = [one for one in account.energy if calendar.day(one.hour) >= since]
    sums = {
        "day": lambda: by_day(rows, energy, calendar),
        "job": lambda: by_job(rows),
        "device": lambda: by_device(rows, energy),
    }[by]()
    return {
        "by": by,
        "since": since or None,
        "rows": [
            {"id": key, "name": account.names.get(key, key), **as_json(one, account.tariff)}
            for key, one in sums.items()
        ],
        "total": as_json(sum(sums.values(), Sum()), account.tariff),
        "currency": account.tariff.currency,
        "ledger": ledger(account),
    }


def unit_page(params: Mapping[str, Any], book: AccountBook, names: Mapping[str, str]) -> Section:
    """Single units, the newest first, and where the next page begins."""
    most, word, after = params.get("most", 100), params.get("standing"), params.get("after")
    if not isinstance(most, int) or isinstance(most, bool) or not 1 <= most <= MOST_UNITS:
        raise _bad(f"most = {most!r:.40}", f"give 1 to {MOST_UNITS}")
    if word is not None and word not in Standing.__members__.values():
        raise _bad(f"standing = {word!r:.40}", f"use one of {', '.join(Standing)}")
    found = book.units(None if word is None else Standing(word), _cursor(after), most + 1)
    shown = found[:most]
    return {
        "units": [unit_json(unit, names) for unit in shown],
        "next": _place(shown[-1]) if len(found) > most else None,
        "counts": {kind.value: {"units": one.units, "micro": one.micro} for kind, one in sorted(book.counts().items())},
    }


def _place(unit: OwnUnit) -> list[Any]:
    line = unit.line
    return [unit.seen, line.job_id, line.epoch, line.rank, unit.step]


def _cursor(after: Any) -> tuple[int, str, int, int, int] | None:
    if after is None:
        return None
    kinds = (int, str, int, int, int)
    if not isinstance(after, list) or [type(part) for part in after] != list(kinds):
        raise _bad(f"after = {after!r:.60}", "give the `next` of the page before")
    if any(isinstance(part, int) and abs(part) >= 1 << 63 for part in after):
        raise _bad("after is out of range", "give the `next` of the page before")
    return (after[0], after[1], after[2], after[3], after[4])


def _bad(message: str, fix: str) -> RequestError:
    return RequestError(code="bad_params", message=message, fix=fix)
