"""`distensor pause`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor_tui.answers import ask
from distensor_tui.arguments import duration
from distensor_tui.clock import local, system_now
from distensor_tui.moments import moment


def options(parser: argparse.ArgumentParser) -> None:
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--for", dest="seconds", type=duration, metavar="2h", help="then work again by itself")
    end.add_argument("--until", type=_hour, metavar="18:00", help="work again at that time, today or tomorrow")


def _hour(text: str) -> float:
    at = moment(text, system_now(), None) if ":" in text else None
    if at is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 18:00")
    return at


def run(options: argparse.Namespace, path: Path) -> int:
    given = {"seconds": options.seconds, "until": options.until}
    return ask(options, path, options.verb, {name: value for name, value in given.items() if value}, _paused)


def _paused(result: Mapping[str, Any]) -> str:
    """A supervisor of another version may say nothing of the end."""
    at = result.get("until")
    if not isinstance(at, int | float):
        return "paused: this node takes no work and earns nothing until `distensor resume`"
    end = f"{local(at, None):%Y-%m-%d %H:%M}"
    return f"paused until {end}: this node takes no work and earns nothing; `distensor resume` ends it early"
