"""`distensor retry [WORKER]`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor_tui.answers import ask


def options(parser: argparse.ArgumentParser) -> None:
    """Which worker; all when none is named."""
    parser.add_argument("worker", nargs="?", help="only this one; its name stands in `distensor jobs --json`")


def run(options: argparse.Namespace, path: Path) -> int:
    params = {} if options.worker is None else {"worker": options.worker}
    return ask(options, path, "reset_breaker", params, _done)


def _done(result: Mapping[str, Any]) -> str:
    names = result.get("reset") or []
    return f"started again: {', '.join(map(str, names))}" if names else "no worker is broken"
