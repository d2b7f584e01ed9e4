"""May the dashboard be drawn here? Asked before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import IO

MIN_WIDTH, MIN_HEIGHT = 60, 15


def fit_for_dashboard(environ: Mapping[str, str], streams: Sequence[IO[str]]) -> bool:
    """Terminals on both ends that can be drawn on and are large enough."""
    if environ.get("TERM", "dumb") in ("dumb", "", "unknown"):
        return False
    return all(_is_terminal(stream) for stream in streams) and _large_enough(streams[-1])


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _large_enough(stream: IO[str]) -> bool:
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return False
    return size.columns >= MIN_WIDTH and size.lines >= MIN_HEIGHT
