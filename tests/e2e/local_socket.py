"""The supervisor's local socket, read the way the dashboard does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def snapshot(path: Path) -> dict[str, Any]:
    """The whole state of one supervisor right now."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        with connection.makefile("r", encoding="utf-8") as lines:
            hello = json.loads(lines.readline())
            assert hello["schema_version"] == 1
            data: dict[str, Any] = json.loads(lines.readline())["data"]
            return data


def ask(path: Path, method: str, **params: Any) -> dict[str, Any]:
    """What the supervisor answers to a request of its owner."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        with connection.makefile("rw", encoding="utf-8") as lines:
            lines.write(json.dumps({"type": "request", "id": "1", "method": method, "params": params}) + "\n")
            lines.flush()
            while (answer := json.loads(lines.readline()))["type"] != "response":
                continue
            result: dict[str, Any] = answer["result"]
            return result


def wait_until(path: Path, wanted: Callable[[dict[str, Any]], bool], seconds: float = 30) -> dict[str, Any]:
    """The first snapshot for which `wanted` holds."""
    deadline = time.monotonic() + seconds
    while True:
        data = snapshot(path)
        if wanted(data):
            return data
        assert time.monotonic() < deadline, f"not in time; last seen: {json.dumps(data)[:3000]}"
        time.sleep(0.05)
