"""The last lines of a log file for who looks: the supervisor's own, or a worker's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from distensor_server.feature import Feature
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.ownlog import under_journald
from distensor_server.workforce import file_word

MOST_LINES = 500
LONGEST_LINE = 1000
MOST_BYTES = 128 * 1024
"""What is read from the end of a file, and about what an answer holds."""


class LogTail(Feature):
    """The method `log_tail`."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def methods(self) -> Mapping[str, Method]:
        return {"log_tail": self._on_log_tail}

    def _on_log_tail(self, params: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        worker, lines = params.get("worker"), params.get("lines", 200)
        wanted = isinstance(lines, int) and not isinstance(lines, bool) and 0 < lines <= MOST_LINES
        if params.keys() - {"worker", "lines"} or not wanted or not isinstance(worker, str | None):
            raise RequestError(
                code="bad_params",
                message="expected {'worker': id or nothing, 'lines': number}",
                fix=f"ask for 1 to {MOST_LINES} lines; without a worker they are the supervisor's own",
            )
        return self._answer(worker, lines)

    async def _answer(self, worker: str | None, lines: int) -> Mapping[str, Any]:
        path = self._node.state.own_log if worker is None else self._node.state.logs / f"{file_word(worker)}.log"
        try:
            found, more = await asyncio.to_thread(tail, path, lines)
        except FileNotFoundError as error:
            raise self._no_file(worker, path) from error
        except OSError as error:
            raise RequestError(code="unreadable", message=f"{path}: {error.strerror}") from error
        return {"path": str(path), "lines": found, "more": more}

    def _no_file(self, worker: str | None, path: Path) -> RequestError:
        if worker is None and under_journald(self._node.environment):
            fix = "journalctl --user -u distensor-server (without --user for a system service)"
            return RequestError(code="in_journal", message="the supervisor's log is in the journal", fix=fix)
        fix = "a worker's file appears when it starts and goes when it is one of the oldest"
        return RequestError(code="no_log", message=f"there is no {path}", fix="" if worker is None else fix)


def tail(path: Path, lines: int) -> tuple[list[str], bool]:
    """The last lines, the newest last, and whether there were more before them. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - MOST_BYTES)
        file.seek(start)
        data = file.read(MOST_BYTES)
    found = data.decode("utf-8", "replace").splitlines()
    found = found[1:] if start else found  # the first one begins somewhere before
    return [text[:LONGEST_LINE] for text in found[-lines:]], bool(start) or len(found) > lines
