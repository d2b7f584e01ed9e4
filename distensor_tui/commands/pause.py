"""`distensor pause`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui.answers import order
from distensor_tui.arguments import duration

DONE = "paused: this node takes no work and earns nothing until it resumes"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", dest="seconds", type=duration, metavar="2h", help="then work again by itself")


def run(options: argparse.Namespace, path: Path) -> int:
    return order(options, path, {"seconds": options.seconds} if options.seconds else {}, DONE)
