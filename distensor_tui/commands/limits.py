"""`distensor limits get|set|unset`: the supervisor reads, checks and keeps them; this is the way there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor_tui.answers import ask


def options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="get|set|unset")
    get = actions.add_parser("get", help="all limits, or one")
    get.add_argument("key", nargs="?", metavar="KEY")
    change = actions.add_parser("set", help="change one")
    change.add_argument("key", metavar="KEY")
    change.add_argument("value", metavar="VALUE")
    actions.add_parser("unset", help="back to the default").add_argument("key", metavar="KEY")
    for each in actions.choices.values():
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object on one line")
        each.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help="the supervisor's socket")


def run(options: argparse.Namespace, path: Path) -> int:
    params = {name: getattr(options, name) for name in ("key", "value") if getattr(options, name, None) is not None}
    return ask(options, path, f"limits_{options.action}", params, _text)


def _text(result: Mapping[str, Any]) -> str:
    return "\n".join(f"{name:<24} {json.dumps(value)}" for name, value in result.items()) or "done"
