"""`distensor earnings`: the summary, a statement by day, job or device, or single units; as text, CSV or JSON."""

from __future__ import annotations

import argparse
import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distensor_tui import format as fmt
from distensor_tui import plain
from distensor_tui.answers import fail, print_json, print_text, show, with_supervisor
from distensor_tui.exitcodes import ExitCode
from distensor_tui.fields import Fields, clean
from distensor_tui.income import STANDINGS, Group, read_group, read_ledger, read_sum
from distensor_tui.once import Conversation

SECTIONS = ("earnings", "income")
PAGE = 500
UNIT_COLUMNS = (
    "job", "job_name", "epoch", "rank", "step", "standing", "claimed", "hub_claimed", "hub_received", "hub_state",
    "micro", "seen",
)  # fmt: skip
SUM_COLUMNS = (
    "units",
    "micro",
    "millijoules",
    "fixed_millijoules",
    "work_ms",
    "unmeasured_ms",
    "cost_micro",
    "net_micro",
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=("day", "job", "device"), help="a statement: one row for each")
    parser.add_argument("--since", type=day, metavar="DATE", help="a statement from this day on, such as 2026-01-31")
    parser.add_argument(
        "--csv", action="store_true", help="comma-separated values; whole micro-credits and millijoules"
    )
    parser.add_argument("--units", action="store_true", help="each unit: this node's record and the hub's")
    parser.add_argument("--standing", choices=STANDINGS, help="with --units: only these")
    parser.add_argument(
        "-n", dest="most", type=count, default=100, metavar="N", help="with --units: how many, 0 for all"
    )


def day(text: str) -> str:
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a day such as 2026-01-31")
    return text


def count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def run(options: argparse.Namespace, path: Path) -> int:
    if options.units:
        return with_supervisor(options, path, lambda conversation: _units(options, conversation))
    if options.by or options.since or options.csv:
        return with_supervisor(options, path, lambda conversation: _statement(options, conversation))
    return show(options, path, plain.earnings, SECTIONS)


def _statement(options: argparse.Namespace, conversation: Conversation) -> int:
    params = {"by": options.by or "day", **({"since": options.since} if options.since else {})}
    answer = conversation.ask("statement", params)
    if not answer.ok:
        return fail(options, answer.code, answer.message or answer.code, answer.fix)
    if options.json:
        print_json({"result": dict(answer.result)})
        return ExitCode.OK
    found = Fields(answer.result, "statement", [])
    groups = [read_group(row) for row in found.objects("rows")]
    whole = Group(id="total", name="total", sum=read_sum(found.object("total")))
    if options.csv:
        print_text(_csv(("id", "name", *SUM_COLUMNS), [_values(group) for group in [*groups, whole]]))
        return ExitCode.OK
    currency = found.text("currency")
    print_text("\n".join(_text_row(group, currency) for group in [*groups, whole]))
    print_text(f"ledger     {plain.ledger(read_ledger(found.object('ledger')), None)}")
    return ExitCode.OK


def _values(group: Group) -> list[object]:
    return [group.id, group.name, *(getattr(group.sum, name) for name in SUM_COLUMNS)]


def _text_row(group: Group, currency: str) -> str:
    one = group.sum
    name = group.name or "just now"
    parts = [f"{name:<24}", f"{fmt.credits(one.micro):>16} credits", f"{one.units:>9,} units"]
    parts += [f"{fmt.energy(one.millijoules):>11}"] if one.millijoules is not None else []
    parts += [f"cost {fmt.spent(one.cost_micro, currency)}"] if one.cost_micro else []
    parts += [f"net {fmt.money(one.net_micro, currency)}"] if one.net_micro is not None else []
    return "  ".join(parts)


def _units(options: argparse.Namespace, conversation: Conversation) -> int:
    found: list[Mapping[str, Any]] = []
    counts: Mapping[str, Any] = {}
    after: object = None
    while not options.most or len(found) < options.most:
        most = min(PAGE, options.most - len(found)) if options.most else PAGE
        params = {"most": most, "after": after, **({"standing": options.standing} if options.standing else {})}
        answer = conversation.ask("units", params)
        if not answer.ok:
            return fail(options, answer.code, answer.message or answer.code, answer.fix)
        page, after, counts = answer.result.get("units"), answer.result.get("next"), answer.result.get("counts", {})
        found += [one for one in page if isinstance(one, Mapping)] if isinstance(page, list) else []
        if after is None:
            break
    _print_units(options, found, counts, more=after is not None)
    return ExitCode.OK


def _print_units(
    options: argparse.Namespace, found: Sequence[Mapping[str, Any]], counts: Mapping[str, Any], *, more: bool
) -> None:
    if options.json:
        print_json({"result": {"units": [dict(one) for one in found], "counts": dict(counts), "more": more}})
    elif options.csv:
        print_text(_csv(UNIT_COLUMNS, [[one.get(name) for name in UNIT_COLUMNS] for one in found]))
    else:
        rows = [_unit_text(one) for one in found] or ["no such unit; old matched ones are kept as sums"]
        print_text("\n".join([*rows, *(["more: give -n 0 for all"] if more else [])]))


def _unit_text(one: Mapping[str, Any]) -> str:
    micro = one.get("micro")
    words = [
        f"{str(one.get('standing')).replace('_', ' '):<14}",
        f"{one.get('job_name')} epoch {one.get('epoch')} rank {one.get('rank')} step {one.get('step')}",
        f"here {_size(one.get('claimed'))}",
        f"hub claimed {_size(one.get('hub_claimed'))} received {_size(one.get('hub_received'))}",
        f"{fmt.credits(micro if isinstance(micro, int) else None)} credits",
    ]
    return clean("  ".join(words))


def _size(value: object) -> str:
    return fmt.NOTHING if value is None else str(value)


def _csv(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Text that a spreadsheet would take for a formula gets an apostrophe: names are chosen by strangers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[_harmless(value) for value in row] for row in rows])
    return out.getvalue().rstrip("\n")


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
