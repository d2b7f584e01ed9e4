"""`distensor jobs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui import plain
from distensor_tui.answers import show

SECTIONS = ("jobs", "workers")


def options(_parser: argparse.ArgumentParser) -> None:
    """Nothing besides --json and --socket."""


def run(options: argparse.Namespace, path: Path) -> int:
    return show(options, path, plain.jobs, SECTIONS)
