"""Lines on standard output that do not get mixed up between ranks."""

from __future__ import annotations

import sys

from distensor.core.distributed.accessors import get_global_rank, get_world_size


def print_rank_0(message: object) -> None:
    """Print on rank 0 only."""
    if get_global_rank() == 0:
        _write(str(message))


def print_per_rank(message: object) -> None:
    """Print on every rank, each line with its number."""
    mark = f"[rank {get_global_rank()} of {get_world_size()}] "
    _write("\n".join(mark + line for line in str(message).splitlines() or [""]))


def _write(text: str) -> None:
    # One write for each message: the lines of several processes stay whole.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
