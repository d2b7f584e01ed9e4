"""Reading the command line of `distensor`. Only the module of the command that was asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast

from distensor_tui import __version__, guide
from distensor_tui.table import BY_NAME, Verb

VALUE_OPTIONS = frozenset({"--socket", "--replay", "--screenshot", "--size", "--wait", "--screen"})
"""Options of the dashboard that take a value."""


class UsageError(Exception):
    """A command line that cannot be read: what is wrong, and the usage of the command."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class Command(Protocol):
    """The module of a command of this wheel."""

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add what the command takes besides --json and --socket."""

    def run(self, options: argparse.Namespace, path: Path) -> int:
        """Do it; the exit code. `path` is the supervisor's socket."""


class Parser(argparse.ArgumentParser):
    """argparse, that leaves to its caller how an error is told, and prints our own help."""

    page = ""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage().strip())

    def format_help(self) -> str:
        return self.page.format(options=super().format_help()) if self.page else super().format_help()


def build() -> Parser:
    """The parser without a command: the dashboard's options."""
    parser = Parser(prog="distensor", usage="distensor [OPTIONS] [COMMAND ...]", add_help=False, allow_abbrev=False)
    parser.page = guide.overview()
    shown = parser.add_argument_group("Options without a command")
    shown.add_argument("-h", "--help", action="help", help="this text")
    shown.add_argument("--version", action="version", version=f"distensor {__version__}")
    shown.add_argument("--json", action="store_true", help="print the status as one JSON object and end")
    _dashboard_options(shown)
    return parser


def command_of(verb: Verb) -> Command:
    return cast("Command", importlib.import_module(verb.module))


def build_verb(verb: Verb, command: Command) -> Parser:
    """The parser of one command of this wheel."""
    parser = Parser(prog=f"distensor {verb.name}", add_help=False, allow_abbrev=False)
    parser.page = guide.page(verb)
    command.options(parser)
    parser.add_argument("-h", "--help", action="help", help="this text")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--socket", metavar="PATH", help="the supervisor's socket")
    return parser


def _dashboard_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--socket", metavar="PATH", help="the supervisor's socket, also before a command")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--replay", metavar="FILE", help="show a recording instead of a supervisor")
    source.add_argument("--demo", action="store_true", help="show the recording that comes with this version")
    parser.add_argument("--screenshot", metavar="FILE.svg", help="write the dashboard as SVG and end")
    parser.add_argument("--size", type=size, default=(120, 40), metavar="WxH", help="size of the screenshot")
    parser.add_argument("--wait", type=positive, default=2.0, metavar="S", help="watch so long before the screenshot")
    parser.add_argument("--screen", type=int, choices=range(1, 8), default=1, help="open this screen first")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal, to select text with")


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


def place_of_verb(arguments: Sequence[str]) -> int | None:
    """Where the command stands, behind options of our own; None without a command."""
    skip = False
    for i, word in enumerate(arguments):
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in VALUE_OPTIONS
        else:
            return i
    return None


def own_verb(name: str) -> Verb | None:
    """The row of a command of this wheel."""
    verb = BY_NAME.get(name)
    return verb if verb is not None and verb.module else None
