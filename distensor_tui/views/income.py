"""Earnings, energy and the comparison with the hub as lines and tables. Money is never rounded up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distensor_tui import format as fmt
from distensor_tui.fields import clean
from distensor_tui.income import DIFFERENT, Group, Income, Ledger, Sum
from distensor_tui.model import HubState
from distensor_tui.scene import Look, View
from distensor_tui.text import Line, Span, Tone, line
from distensor_tui.views.draw import Column, labelled, paragraph, sparkline, table

LABEL = 11
WORDS = {
    "matched": "matched",
    "unconfirmed": "unconfirmed",
    "refused": "refused: the two sides say different sizes",
    "missing_here": "missing here: credited by the hub, unknown to this node",
    "missing_there": "missing at the hub: claimed by this node, unknown there",
}
SHORT = {"refused": "refused", "missing_here": "missing here", "missing_there": "missing at the hub"}
Facts = list[tuple[str, str]]


def summary(income: Income, view: View, size: int, look: Look) -> list[Line]:
    """The lines above the tables: what was earned, where it is, what it cost, whether the books agree."""
    rows = [_spans(income, look), _where(income, view), *_credits(income)]
    rows += [ledger_line(income.ledger, view, look), *_energy(income)]
    rows += _hours(income, size, look)
    if income.projection_micro is not None:
        days = fmt.plural(income.projection_days, "whole day")
        rows.append(
            labelled(
                "projection",
                line(
                    f"{fmt.short_credits(income.projection_micro)} cr",
                    (f" in 30 days like the last {days}", Tone.DIM),
                ),
                LABEL,
            )
        )
    return rows


def _spans(income: Income, look: Look) -> Line:
    parts: list[Span | tuple[str, Tone]] = [(f"{fmt.short_credits(income.today.micro)} cr", Tone.GOOD)]
    for name, one in (("7 d", income.week), ("30 d", income.month)):
        parts += [(f"   {name} ", Tone.DIM), (f"{fmt.short_credits(one.micro)} cr", Tone.TEXT)]
    if not look.narrow:
        parts += [("   in all ", Tone.DIM), (f"{fmt.credits(income.total.micro)} cr", Tone.STRONG)]
    return labelled("today", line(*parts), LABEL)


def _hours(income: Income, size: int, look: Look) -> list[Line]:
    if not any(income.hours):
        return []
    text = sparkline(income.hours, min(48, size - LABEL - 20), look.glyphs)
    best = f"  at most {fmt.short_credits(max(income.hours))} cr"
    return [labelled("48 hours", line((text, Tone.ACCENT), (best, Tone.DIM)), LABEL)]


def _where(income: Income, view: View) -> Line:
    """What was confirmed, and what waits for the trainer's word."""
    confirmed = view.snapshot.earnings
    micro = income.total.micro if confirmed is None else confirmed.confirmed_micro
    units = income.total.units if confirmed is None else confirmed.confirmed_units
    unconfirmed = income.pending_units if confirmed is None else confirmed.pending_units
    return labelled(
        "confirmed",
        line(
            (f"{fmt.credits(micro)} cr", Tone.STRONG),
            (f" {fmt.plural(units, 'unit')}   claimed ", Tone.DIM),
            f"{fmt.plural(unconfirmed, 'unit')}",
            *([] if income.money is None else [(f"   fees {fmt.credits(income.money.fees)} cr", Tone.DIM)]),
        ),
        LABEL,
    )


def _credits(income: Income) -> list[Line]:
    """Where they are in the hub's ledger: to be challenged, held, payable, paid."""
    money = income.money
    if money is None:
        return []
    parts: list[Span | tuple[str, Tone]] = []
    for name, micro, tone in (
        ("pending", money.pending, Tone.TEXT),
        ("held", money.held, Tone.WARN),
        ("payable", money.payable, Tone.GOOD),
        ("on their way", money.clearing, Tone.TEXT),
        ("paid", money.paid, Tone.TEXT),
        ("taken back", money.void, Tone.WARN),
    ):
        if micro or name in ("pending", "payable", "paid"):
            parts += [(f"{name} ", Tone.DIM), (f"{fmt.credits(micro)}  ", tone)]
    return [labelled("credits", line(*parts), LABEL)]


def _energy(income: Income) -> list[Line]:
    """Energy of own work, its cost and the net; what is not measured is said, not guessed."""
    rows = []
    today, month = income.today, income.month
    if month.millijoules is not None or month.work_ms:
        parts: list[Span | tuple[str, Tone]] = []
        for name, one in (("today", today), ("30 d", month)):
            parts += [(f"{name} ", Tone.DIM), (_energy_text(one), Tone.TEXT)]
            if one.cost_micro is not None and one.millijoules is not None:
                parts += [(f" {fmt.spent(one.cost_micro, income.currency)}", Tone.DIM)]
            parts += [("   ", Tone.DIM)]
        rows.append(labelled("energy", line(*parts), LABEL))
    if month.net_micro is not None and month.millijoules is not None:
        less = " less what was not measured" if month.unmeasured_ms else ""
        net = [("today ", Tone.DIM), (fmt.money(today.net_micro, income.currency), Tone.GOOD)]
        net += [("   30 d ", Tone.DIM), (fmt.money(month.net_micro, income.currency), Tone.TEXT), (less, Tone.WARN)]
        rows.append(labelled("net", line(*net), LABEL))
    return rows


def _energy_text(one: Sum) -> str:
    if one.millijoules is None:
        return "not available" if one.work_ms else fmt.energy(0)
    label = ""
    if one.fixed_millijoules:
        label = " by your figure" if one.fixed_millijoules == one.millijoules else " partly by your figure"
    if one.unmeasured_ms >= 1000:
        label += f", {fmt.span(one.unmeasured_ms / 1000)} of work not measured"
    return fmt.energy(one.millijoules) + label


def ledger_line(ledger: Ledger, view: View, look: Look) -> Line:
    """'= hub' and when, or what differs."""
    glyphs = look.glyphs
    at = fmt.hour(ledger.at, look.zone)
    hub = view.snapshot.hub
    if ledger.state == "unconfirmed" or (hub is not None and hub.state is not HubState.CONNECTED):
        earnings = view.snapshot.earnings
        since = earnings.confirmed_at if earnings and earnings.confirmed_at is not None else hub.since if hub else None
        words = line((f"{glyphs.warn} unconfirmed since {fmt.hour(since, look.zone)}", Tone.WARN), _open(ledger, look))
    elif ledger.state == "differs":
        words = line((f"{glyphs.warn} differs from the hub: {_differences(ledger)}", Tone.WARN), ("  v", Tone.KEY))
    elif ledger.state == "equal":
        words = line((f"= hub {glyphs.ok} {at}", Tone.GOOD), _open(ledger, look))
    else:
        words = line((ledger.reason or "not compared yet", Tone.DIM))
    if ledger.reason and ledger.state in ("equal", "differs"):
        words = (*words, Span(f"  ({ledger.reason})", Tone.WARN))
    return labelled("ledger", words, LABEL)


def _open(ledger: Ledger, look: Look) -> tuple[str, Tone]:
    waiting = ledger.count("unconfirmed")
    text = f"   {ledger.count('matched').units:,} matched"
    if waiting.units:
        text += f", {waiting.units:,} unconfirmed since {fmt.hour(waiting.since, look.zone)}"
    return text, Tone.DIM


def _differences(ledger: Ledger) -> str:
    found = [f"{ledger.count(word).units:,} {SHORT[word]}" for word in DIFFERENT if ledger.count(word).units]
    if not found:
        return f"{fmt.credits(ledger.own_micro)} here, {fmt.credits(ledger.hub_micro)} there"
    return ", ".join(found)


COLUMNS = (
    Column("", least=10),
    Column("credits", right=True),
    Column("units", right=True),
    Column("energy", right=True),
    Column("cost", right=True),
    Column("net", right=True),
)


def groups(income: Income, by: str) -> Sequence[Group]:
    """Days newest first, those without work left out; jobs and devices by what they earned."""
    if by == "job":
        return income.jobs
    if by == "device":
        return income.devices
    return [day for day in reversed(income.days) if day.sum.micro or day.sum.work_ms]


def group_table(found: Sequence[Group], by: str, currency: str, size: int) -> list[Line]:
    rows: list[list[Span | str]] = [
        [
            group.name or _nameless(by),
            fmt.credits(group.sum.micro),
            f"{group.sum.units:,}",
            fmt.energy(group.sum.millijoules) if by != "job" else fmt.NOTHING,
            fmt.spent(group.sum.cost_micro, currency) if by != "job" else fmt.NOTHING,
            fmt.money(group.sum.net_micro, currency) if by != "job" else fmt.NOTHING,
        ]
        for group in found
    ]
    return table((Column(by, least=10), *COLUMNS[1:]), rows, size)


def _nameless(by: str) -> str:
    """Day '' is from before hours were kept; job and device '' are of what came since the last statement."""
    return "earlier" if by == "day" else "just now"


def group_facts(group: Group, by: str, currency: str) -> Facts:
    one = group.sum
    facts = [(by, group.name or _nameless(by)), ("credits", fmt.credits(one.micro)), ("units", f"{one.units:,}")]
    if by == "job":
        return [*facts, ("job id", group.id), ("energy", "not divided among jobs: a meter does not know them")]
    return [
        *facts,
        ("energy", _energy_text(one)),
        ("work", fmt.span(one.work_ms / 1000)),
        ("cost", fmt.spent(one.cost_micro, currency)),
        ("net", fmt.money(one.net_micro, currency)),
    ]


UNIT_COLUMNS = (
    Column("seen"),
    Column("job", least=8),
    Column("rank", right=True),
    Column("step", right=True),
    Column("here", right=True),
    Column("hub", right=True),
    Column("credits", right=True),
    Column("standing", least=11),
)


def unit_table(units: Sequence[Mapping[str, Any]], size: int, look: Look) -> list[Line]:
    rows: list[list[Span | str]] = []
    for one in units:
        word = str(one.get("standing"))
        tone = Tone.WARN if word in DIFFERENT else Tone.GOOD if word == "matched" else Tone.TEXT
        there = "/".join(_size(one.get(name)) for name in ("hub_claimed", "hub_received"))
        rows.append(
            [
                _when(one.get("seen"), look),
                clean(str(one.get("job_name") or one.get("job"))),
                _size(one.get("rank")),
                _size(one.get("step")),
                _size(one.get("claimed")),
                there,
                fmt.credits(one["micro"] if isinstance(one.get("micro"), int) else None),
                Span(clean(SHORT.get(word, word)), tone),
            ]
        )
    return table(UNIT_COLUMNS, rows, size)


def unit_facts(one: Mapping[str, Any], look: Look) -> Facts:
    word = str(one.get("standing"))
    return [
        ("job", clean(f"{one.get('job_name')} ({one.get('job')})")),
        ("epoch", _size(one.get("epoch"))),
        ("rank", _size(one.get("rank"))),
        ("step", _size(one.get("step"))),
        ("standing", clean(WORDS.get(word, word))),
        ("claimed here", f"{_size(one.get('claimed'))} micro-batches"),
        ("hub: claimed", f"{_size(one.get('hub_claimed'))} micro-batches"),
        ("hub: received", f"{_size(one.get('hub_received'))} micro-batches by the trainer"),
        ("hub: state", clean(str(one.get("hub_state") or "not known there, or not asked yet"))),
        ("credited", fmt.credits(one["micro"] if isinstance(one.get("micro"), int) else None)),
        ("first seen", _when(one.get("seen"), look)),
    ]


def _size(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else fmt.NOTHING


def _when(value: object, look: Look) -> str:
    return fmt.hour(float(value), look.zone, with_seconds=True) if isinstance(value, int | float) else fmt.NOTHING


def empty(size: int) -> list[Line]:
    text = "Nothing earned yet: the first verified step brings the first credits. `w` says what is in the way."
    return paragraph(text, size, Tone.DIM)


def payout(income: Income, size: int) -> list[Line]:
    return paragraph(income.payout_note, size, Tone.DIM) if income.payout_note else []


def no_power(income: Income, size: int) -> list[Line]:
    """Why a device's energy is missing, and what the owner can do."""
    rows = []
    for device, reason in income.no_power.items():
        text = f"energy of {device} is not available: {reason}; `distensor limits set fixed_watts` takes your figure"
        rows += paragraph(text, size, Tone.DIM)
    return rows
