"""The last picture that a supervisor left behind in a file, for when it is away."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from distensor_tui.model import Snapshot
from distensor_tui.sections import apply
from distensor_tui.wire import SCHEMA_VERSION

LARGEST = 8 << 20
NAME = "snapshot.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastSeen:
    at: float
    snapshot: Snapshot


def places(socket: Path) -> tuple[Path, ...]:
    """Where the supervisor of this socket keeps its state by default: beside the socket, or one folder down."""
    return socket.parent / NAME, socket.parent / "server" / NAME


def load(paths: tuple[Path, ...]) -> LastSeen | None:
    """The first file that can be read and understood; None without one: there is nothing to say about it."""
    return next((found for path in paths if (found := _read(path)) is not None), None)


def _read(path: Path) -> LastSeen | None:
    try:
        if path.stat().st_size > LARGEST:
            return None
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
        return None
    at, data = raw.get("at"), raw.get("data")
    if not isinstance(at, int | float) or isinstance(at, bool) or not isinstance(data, dict):
        return None
    snapshot = apply(Snapshot(), data, full=True)
    return LastSeen(at=float(at), snapshot=snapshot) if snapshot.node is not None else None
