"""`distensor jobs`: of this machine, or, with a further word, of an account at its hub (the wheel `distensor`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui import plain, verbs
from distensor_tui.answers import show

SECTIONS = ("jobs", "workers")
AT_HUB = ("list", "show", "explain", "cancel")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", choices=AT_HUB, help="ask the hub of DISTENSOR_TOKEN about an account's jobs"
    )
    parser.add_argument("job", nargs="?", help="the id of a job, for all but `list`")
    parser.add_argument("--ended", action="store_true", help="with `list`: also those that have ended")
    parser.add_argument("--reason", metavar="TEXT", help="with `cancel`: for those who ask later")


def run(options: argparse.Namespace, path: Path) -> int:
    if options.what is None:
        return show(options, path, plain.jobs, SECTIONS)
    words = [options.what, *([options.job] if options.job else [])]
    words += ["--ended"] if options.ended else []
    words += ["--reason", options.reason] if options.reason else []
    words += ["--json"] if options.json else []
    return verbs.run("jobs", words)
