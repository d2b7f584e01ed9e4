"""`distensor resume`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui.answers import order

DONE = "resumed"


def options(_parser: argparse.ArgumentParser) -> None:
    """Nothing besides --json and --socket."""


def run(options: argparse.Namespace, path: Path) -> int:
    return order(options, path, {}, DONE)
