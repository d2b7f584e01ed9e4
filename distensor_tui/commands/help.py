"""`distensor help [COMMAND]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui import arguments, guide
from distensor_tui.answers import fail, print_json, print_text
from distensor_tui.exitcodes import MEANINGS, ExitCode
from distensor_tui.table import BY_NAME, VERBS, Verb

CODES = "exit-codes"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", metavar="COMMAND", help=f"a command, or {CODES}")


def run(options: argparse.Namespace, path: Path) -> int:
    if options.topic is not None and options.topic != CODES and options.topic not in BY_NAME:
        message, fix = f"there is no command {options.topic!r}", "distensor help lists the commands"
        return fail(options, "usage", message, fix, ExitCode.USAGE)
    if options.json:
        print_json({"commands": _rows(options.topic), "exit_codes": {str(int(c)): m for c, m in MEANINGS.items()}})
    else:
        print_text(_text(options.topic).rstrip("\n"))
    return ExitCode.OK


def _text(topic: str | None) -> str:
    if topic is None:
        return arguments.build().format_help()
    if topic == CODES:
        return guide.exit_codes()
    verb = BY_NAME[topic]
    if verb.module:
        return arguments.build_verb(verb, arguments.command_of(verb)).format_help()
    return "\n".join([verb.about, f"It comes with the wheel {verb.wheel}.", "", *guide.taught(verb)])


def _rows(topic: str | None) -> list[dict[str, object]]:
    return [_row(verb) for verb in VERBS if topic in (None, CODES, verb.name)]


def _row(verb: Verb) -> dict[str, object]:
    examples = [{"line": line, "does": does} for line, does in verb.examples]
    return {
        "name": verb.name,
        "group": str(verb.group),
        "about": verb.about,
        "examples": examples,
        "next": verb.then,
        "wheel": verb.wheel or "distensor-tui",
    }
