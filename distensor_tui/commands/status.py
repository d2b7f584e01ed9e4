"""`distensor status`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui import plain
from distensor_tui.answers import show

SECTIONS = ("node", "hub", "devices", "workers", "jobs", "earnings", "faults", "unavailable")


def options(_parser: argparse.ArgumentParser) -> None:
    """Nothing besides --json and --socket."""


def run(options: argparse.Namespace, path: Path) -> int:
    return show(options, path, plain.status, SECTIONS)
