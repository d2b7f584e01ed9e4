"""The command line of `distensor`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from distensor_tui import __version__

USAGE = 64
SHOWS = {
    "status": "state, hub, jobs, devices and earnings of this node",
    "why": "why this node works or does not: every gate",
    "devices": "the devices and why one is not used",
    "jobs": "running jobs and this node's workers",
    "earnings": "confirmed and pending work",
}
ORDERS = {
    "pause": "stop working and earning, for a time or until resumed",
    "resume": "work again after a pause or drain",
    "drain": "finish running work, take no more",
}
OWN_VERBS = (*SHOWS, *ORDERS, "record")


class Parser(argparse.ArgumentParser):
    """argparse, with the exit code that sysexits has for usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def build() -> Parser:
    parser = Parser(
        prog="distensor",
        description="What this machine does and earns in disTensor. Without a command: the dashboard.",
        epilog="More commands come with other wheels: hub, demo (distensor), cloud (distensor[cloud]).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"distensor {__version__}")
    _dashboard_options(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", parser_class=Parser)
    for name, about in (SHOWS | ORDERS).items():
        _common(verbs.add_parser(name, help=about, description=about.capitalize(), allow_abbrev=False))
    _pause_options(verbs.choices["pause"])
    record = verbs.add_parser("record", help="write the supervisor's stream to a file for --replay", allow_abbrev=False)
    record.add_argument("file", metavar="FILE")
    record.add_argument("--seconds", type=positive, default=60.0, help="how long (default: %(default)s)")
    record.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS)
    return parser


def _dashboard_options(parser: Parser) -> None:
    parser.add_argument("--socket", metavar="PATH", default=None, help="the supervisor's socket")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--replay", metavar="FILE", help="show a recording instead of a supervisor")
    source.add_argument("--demo", action="store_true", help="show the recording that comes with this version")
    parser.add_argument("--screenshot", metavar="FILE.svg", help="write the dashboard as SVG and end")
    parser.add_argument("--size", type=size, default=(120, 40), metavar="WxH", help="size of the screenshot")
    parser.add_argument("--wait", type=positive, default=2.0, metavar="S", help="watch so long before the screenshot")
    parser.add_argument("--screen", type=int, choices=range(1, 8), default=1, help="open this screen first")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--socket", metavar="PATH", default=argparse.SUPPRESS, help="the supervisor's socket")


def _pause_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", dest="seconds", type=duration, metavar="2h", help="then work again by itself")


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})", text)
    if not found or not all(1 <= int(part) <= 1000 for part in found.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 120x40")
    return int(found[1]), int(found[2])


def duration(text: str) -> int:
    """'90s', '30m', '2h', '1d'; a bare number is seconds."""
    found = re.fullmatch(r"(\d{1,9})([smhd]?)", text)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 30m, 2h or 1d")
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def foreign_verb(arguments: Sequence[str]) -> int | None:
    """The place of a command that is not ours, behind our own options."""
    taking_value = {"--socket", "--replay", "--screenshot", "--size", "--wait", "--screen"}
    skip = False
    for i, word in enumerate(arguments):
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in taking_value
        else:
            return None if word in OWN_VERBS else i
    return None
