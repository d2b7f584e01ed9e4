"""`distensor completion bash|zsh|fish`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui import arguments
from distensor_tui.answers import print_json, print_text
from distensor_tui.completion import SHELLS, Entry, entry, flags_of
from distensor_tui.exitcodes import ExitCode
from distensor_tui.table import VERBS, Verb


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SHELLS))


def run(options: argparse.Namespace, path: Path) -> int:
    script = SHELLS[options.shell]([_entry(verb) for verb in VERBS], flags_of(arguments.build()))
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print_text(script)
    return ExitCode.OK


def _entry(verb: Verb) -> Entry:
    parser = arguments.build_verb(verb, arguments.command_of(verb)) if verb.module else None
    return entry(verb, parser)
