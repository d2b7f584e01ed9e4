"""`distensor limits get|set|unset`: the supervisor reads, checks and keeps them; this is the way there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor_tui.answers import ask
from distensor_tui.model import Setting
from distensor_tui.settings import consequence_of, read_limits, source, with_unit


def options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="get|set|unset")
    get = actions.add_parser("get", help="all limits, or one")
    get.add_argument("key", nargs="?", metavar="KEY")
    change = actions.add_parser("set", help="change one")
    change.add_argument("key", metavar="KEY")
    change.add_argument("value", metavar="VALUE", help="as docs/limits.md lists it; lists with commas")
    actions.add_parser("unset", help="back to the default").add_argument("key", metavar="KEY")
    for each in actions.choices.values():
        each.add_argument("--device", metavar="ID", help="for this device alone")
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object on one line")
        each.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help="the supervisor's socket")


def run(options: argparse.Namespace, path: Path) -> int:
    names = ("key", "value", "device")
    params = {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}
    return ask(options, path, f"limits_{options.action}", params, _listed if options.action == "get" else _changed)


def _listed(result: Mapping[str, Any]) -> str:
    limits = read_limits(result, [])
    rows = limits.rows
    width = max((len(_name(row)) for row in rows), default=0)
    values = max((len(with_unit(row)) for row in rows), default=0)
    if len(rows) == 1:
        return "\n".join(_one(rows[0]))
    lines = [f"{_name(row):<{width}}  {with_unit(row):<{values}}  {source(row):<7}  {row.help}" for row in rows]
    return "\n".join([*lines, "", f"your changes are kept in {limits.file}"])


def _name(row: Setting) -> str:
    return f"{row.key} [{row.device}]" if row.device else row.key


def _one(row: Setting) -> list[str]:
    return [
        f"{_name(row)} = {with_unit(row)}",
        f"  {row.help}",
        f"  may be: {row.expected}; default: {row.default or '-'}; this value comes from: {row.source}",
    ]


def _changed(result: Mapping[str, Any]) -> str:
    """What was, what is now, and what came of it."""
    row = read_limits({"rows": [result]}, []).rows[0]
    before = read_limits({"rows": [{**result, "value": result.get("before")}]}, []).rows[0]
    return f"{_name(row)}: {with_unit(before)} -> {with_unit(row)}\n  {consequence_of(result)}"
