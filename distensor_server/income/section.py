"""The section `income` of the local protocol, and the answers of its methods. Pure; plain JSON, money as integers.

Additive to schema version 1. Amounts are micro-credits, energy is millijoules, money is in millionths of `currency`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distensor.comm import LinkState, LinkStatus
from distensor.core.control import Earnings
from distensor.core.statement import NodeMoney, StatementRow
from distensor_server.income.energy import Tariff, cost_micro, net_micro, worth_micro
from distensor_server.income.standing import Standing
from distensor_server.income.sums import (
    Calendar,
    DayOf,
    Sum,
    by_day,
    by_device,
    by_job,
    last_days,
    last_hours,
    projection,
    recent_days,
    with_tail,
)
from distensor_server.income.values import Count, Energy, OwnUnit

Section = dict[str, Any]

PAYOUT_NOTE = "a credit is payable when nobody can challenge it any more; whoever runs the hub pays it out"
MOST_GROUPS = 20
SHOWN_DAYS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What the last comparison with the hub found. `at` is Unix time; `problem` why the newest one failed."""

    at: float | None = None
    problem: str | None = None
    lasting: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Everything that the section is made from."""

    now: float
    link: LinkStatus
    earnings: Earnings
    rows: Sequence[StatementRow]
    energy: Sequence[Energy]
    counts: Mapping[Standing, Count]
    own_micro: int
    compared: Compared
    tariff: Tariff
    no_power: Mapping[str, str] = field(default_factory=dict)
    """Devices that worked and whose power cannot be read, with the reason."""
    names: Mapping[str, str] = field(default_factory=dict)
    money: NodeMoney | None = None
    """Where the credits are, as the hub said with the last statement; None before the first one."""


def income(account: Account, calendar: Calendar, day_of: DayOf) -> Section:
    earnings = account.earnings
    rows = with_tail(account.rows, earnings.confirmed_micro, earnings.confirmed_units, account.now)
    days = by_day(rows, account.energy, calendar)
    recent = recent_days(account.now, SHOWN_DAYS, day_of)
    spans = {"today": recent[-1:], "week": recent[-7:], "month": recent}
    return {
        **{name: as_json(last_days(days, span), account.tariff) for name, span in spans.items()},
        "total": as_json(sum(days.values(), Sum()), account.tariff),
        "hours": last_hours(rows, account.now),
        "days": [{"day": day, **as_json(days.get(day, Sum()), account.tariff)} for day in recent],
        "jobs": _groups(by_job(rows), account, account.names),
        "devices": _groups(by_device(rows, account.energy), account, {}),
        "projection": _projection(days, recent),
        "pending_units": earnings.pending_units,
        "payable_micro": 0 if account.money is None else account.money.payable,
        "paid_micro": 0 if account.money is None else account.money.paid,
        "money": _money(account.money),
        "payout_note": PAYOUT_NOTE,
        "ledger": ledger(account),
        "tariff": _tariff(account.tariff),
        "no_power": dict(account.no_power),
    }


def _money(money: NodeMoney | None) -> Section | None:
    if money is None:
        return None
    return {
        "credited": money.credited,
        "pending": money.pending,
        "held": money.held,
        "payable": money.payable,
        "clearing": money.clearing,
        "paid": money.paid,
        "void": money.void,
        "fees": money.fees,
    }


def as_json(one: Sum, tariff: Tariff) -> Section:
    priced = tariff.price_micro > 0
    return {
        "units": one.units,
        "micro": one.micro,
        "millijoules": one.millijoules if one.measured_ms or one.fixed_millijoules else None,
        "fixed_millijoules": one.fixed_millijoules,
        "work_ms": one.work_ms,
        "unmeasured_ms": one.unmeasured_ms,
        "cost_micro": cost_micro(one.millijoules, tariff) if priced else None,
        "worth_micro": worth_micro(one.micro, tariff),
        "net_micro": net_micro(one.micro, one.millijoules, tariff),
    }


def _groups(sums: Mapping[str, Sum], account: Account, names: Mapping[str, str]) -> list[Section]:
    """The largest groups; the others together as the last, so that the list always adds up."""
    ordered = sorted(sums.items(), key=lambda item: (-item[1].micro, item[0]))
    shown = [
        {"id": key, "name": names.get(key, key), **as_json(one, account.tariff)} for key, one in ordered[:MOST_GROUPS]
    ]
    rest = ordered[MOST_GROUPS:]
    if rest:
        whole = sum((one for _, one in rest), Sum())
        shown.append({"id": "", "name": f"{len(rest)} others", **as_json(whole, account.tariff)})
    return shown


def _projection(days: Mapping[str, Sum], recent: Sequence[str]) -> Section | None:
    found = projection(days, recent)
    return None if found is None else {"month_micro": found[0], "from_days": found[1]}


def _tariff(tariff: Tariff) -> Section | None:
    if tariff.price_micro <= 0 and tariff.credits_micro <= 0:
        return None
    return {
        "price_micro": tariff.price_micro,
        "currency": tariff.currency,
        "credits_micro": tariff.credits_micro,
    }


DIFFERENCES = (Standing.REFUSED, Standing.MISSING_HERE, Standing.MISSING_THERE)


def ledger(account: Account) -> Section:
    """Whether this node's units and the hub's say the same."""
    counts = account.counts
    return {
        "state": _state(account),
        "reason": account.compared.problem,
        "at": None if account.compared.at is None else round(account.compared.at),
        "own_micro": account.own_micro,
        "hub_micro": sum(row.micro for row in account.rows),
        **{kind.value: _count(counts.get(kind, Count())) for kind in Standing},
    }


def _state(account: Account) -> str:
    if account.link.state is not LinkState.CONNECTED:
        return "unconfirmed"
    if account.compared.at is None:
        return "unknown"
    differs = account.compared.lasting or any(account.counts.get(kind, Count()).units for kind in DIFFERENCES)
    return "differs" if differs else "equal"


def _count(count: Count) -> Section:
    return {"units": count.units, "micro": count.micro, "micro_batches": count.micro_batches, "since": count.since}


def unit_json(unit: OwnUnit, names: Mapping[str, str]) -> Section:
    """One unit: what this node has, and what the hub said last."""
    line = unit.line
    return {
        "job": line.job_id,
        "job_name": names.get(line.job_id, line.job_id),
        "epoch": line.epoch,
        "rank": line.rank,
        "step": unit.step,
        "standing": unit.standing.value,
        "claimed": unit.claimed,
        "claimed_at": unit.seen if unit.claimed is not None else None,
        "seen": unit.seen,
        "hub_state": None if unit.hub_state is None else unit.hub_state.value,
        "hub_claimed": unit.hub_claimed,
        "hub_received": unit.hub_received,
        "micro": unit.micro,
    }
