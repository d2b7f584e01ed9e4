"""The section `income`: what was earned and used, and how the node's own account compares with the hub's.

Amounts are whole micro-credits, energy is whole millijoules, money is whole millionths of the owner's currency. They
are never floats on the way to the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distensor_tui.fields import Fields

STANDINGS = ("matched", "unconfirmed", "refused", "missing_here", "missing_there")
DIFFERENT = ("refused", "missing_here", "missing_there")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """What was earned and used in a time, by a job or on a device. None is not available."""

    units: int = 0
    micro: int = 0
    millijoules: int | None = None
    fixed_millijoules: int = 0
    work_ms: int = 0
    unmeasured_ms: int = 0
    cost_micro: int | None = None
    worth_micro: int | None = None
    net_micro: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A day, job or device and its sum."""

    id: str
    name: str
    sum: Sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    units: int = 0
    micro: int = 0
    since: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """`state` is equal, differs, unconfirmed or unknown; `at` is when both sides were last compared."""

    state: str = "unknown"
    reason: str = ""
    at: float | None = None
    own_micro: int = 0
    hub_micro: int = 0
    counts: Mapping[str, Count] = field(default_factory=dict)

    def count(self, standing: str) -> Count:
        return self.counts.get(standing, Count())

    @property
    def different(self) -> int:
        """Units on which the two sides do not agree."""
        return sum(self.count(word).units for word in DIFFERENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Money:
    """Where the credits are in the hub's ledger, in micro-credits; `fees` are the platform's, beside them."""

    pending: int = 0
    held: int = 0
    payable: int = 0
    clearing: int = 0
    paid: int = 0
    void: int = 0
    fees: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Income:
    today: Sum
    week: Sum
    month: Sum
    total: Sum
    hours: tuple[int, ...]
    days: tuple[Group, ...]
    jobs: tuple[Group, ...]
    devices: tuple[Group, ...]
    ledger: Ledger
    pending_units: int = 0
    money: Money | None = None
    """None until the hub has said it, or from a supervisor that does not know it."""
    payout_note: str = ""
    projection_micro: int | None = None
    projection_days: int = 0
    currency: str = ""
    no_power: Mapping[str, str] = field(default_factory=dict)


def caught_up(income: Income, today_micro: int) -> Income:
    """The same account with what was confirmed today: the hub tells that at once, the account asks every some seconds.

    So no sum of several days is below that of today.
    """
    lag = today_micro - income.today.micro
    if lag <= 0:
        return income
    today, week, month = (replace(one, micro=one.micro + lag) for one in (income.today, income.week, income.month))
    return replace(income, today=today, week=week, month=month)


def read_income(raw: Any, problems: list[str]) -> Income:
    f = Fields(raw, "income", problems)
    projection = f.object("projection")
    return Income(
        today=read_sum(f.object("today")),
        week=read_sum(f.object("week")),
        month=read_sum(f.object("month")),
        total=read_sum(f.object("total")),
        hours=f.wholes("hours"),
        days=tuple(Group(id=g.text("day"), name=g.text("day"), sum=read_sum(g)) for g in f.objects("days")),
        jobs=tuple(read_group(g) for g in f.objects("jobs")),
        devices=tuple(read_group(g) for g in f.objects("devices")),
        ledger=read_ledger(f.object("ledger")),
        pending_units=f.count("pending_units"),
        money=read_money(f.object("money")) if raw_money(raw) else None,
        payout_note=f.text("payout_note"),
        projection_micro=projection.whole("month_micro"),
        projection_days=projection.count("from_days"),
        currency=f.object("tariff").text("currency"),
        no_power=f.text_map("no_power"),
    )


def raw_money(raw: Any) -> bool:
    return isinstance(raw, dict) and raw.get("money") is not None


def read_money(f: Fields) -> Money:
    return Money(
        pending=f.count("pending"),
        held=f.count("held"),
        payable=f.count("payable"),
        clearing=f.count("clearing"),
        paid=f.count("paid"),
        void=f.count("void"),
        fees=f.count("fees"),
    )


def read_group(f: Fields) -> Group:
    return Group(id=f.text("id"), name=f.text("name"), sum=read_sum(f))


def read_sum(f: Fields) -> Sum:
    return Sum(
        units=f.count("units"),
        micro=f.count("micro"),
        millijoules=f.whole("millijoules"),
        fixed_millijoules=f.count("fixed_millijoules"),
        work_ms=f.count("work_ms"),
        unmeasured_ms=f.count("unmeasured_ms"),
        cost_micro=f.whole("cost_micro"),
        worth_micro=f.whole("worth_micro"),
        net_micro=f.whole("net_micro"),
    )


def read_ledger(f: Fields) -> Ledger:
    counts = {word: f.object(word) for word in STANDINGS}
    return Ledger(
        state=f.text("state", "unknown"),
        reason=f.text("reason"),
        at=f.number("at"),
        own_micro=f.count("own_micro"),
        hub_micro=f.count("hub_micro"),
        counts={
            word: Count(units=c.count("units"), micro=c.count("micro"), since=c.number("since"))
            for word, c in counts.items()
        },
    )
