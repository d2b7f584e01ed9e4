"""Recordings of a supervisor's stream: written from the real thing, played back with its own times.

One JSON object a line: {"at": unix seconds, "message": {...}}. Nothing in a recording is made up by this package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor_tui.absence import Reason
from distensor_tui.client import Sink
from distensor_tui.clock import Now
from distensor_tui.model import Snapshot
from distensor_tui.once import NoSupervisor, converse
from distensor_tui.sections import apply
from distensor_tui.wire import Answer, Hello, Message, Update, decode


class RecordingError(ValueError):
    """A file that is not a recording; names the file and the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    at: float
    message: Message


def load(path: Path) -> list[Moment]:
    """All moments of a recording. Raises RecordingError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"cannot read the recording {path}: {error}") from error
    moments = [_moment(path, i, row) for i, row in enumerate(text.splitlines(), 1) if row.strip()]
    if not moments or not isinstance(moments[0].message, Hello):
        raise RecordingError(f"{path} is not a recording: its first message must be a supervisor's hello")
    return moments


def _moment(path: Path, number: int, row: str) -> Moment:
    try:
        raw = json.loads(row)
        return Moment(at=float(raw["at"]), message=decode(json.dumps(raw["message"])))
    except (ValueError, TypeError, KeyError) as error:
        raise RecordingError(f"{path} line {number} is not a moment of a recording: {error}") from error


class Player:
    """Feeds a sink from a recording as if it happened now; its clock is that of the recording."""

    def __init__(
        self,
        moments: list[Moment],
        sink: Sink,
        *,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._moments, self._sink, self._sleep, self._ended = moments, sink, sleep, ended
        self._monotonic, self._start = monotonic, monotonic()

    def now(self) -> float:
        """The time inside the recording; it stands still at the end."""
        elapsed = self._monotonic() - self._start
        return min(self._moments[0].at + elapsed, self._moments[-1].at)

    async def run(self) -> None:
        self._start = self._monotonic()
        for moment in self._moments:
            wait = moment.at - self.now()
            if wait > 0:
                await self._sleep(wait)
            self._play(moment.message)
        self._ended()

    async def ask(self, method: str, params: Mapping[str, object] | None = None, within: float = 0.0) -> Answer:
        """A recording takes no orders."""
        return Answer(id="", ok=False, code="recording", message="This is a recording; nothing can be changed in it")

    def _play(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._sink.on_hello(message)
        elif isinstance(message, Update):
            self._sink.on_update(message)


def record(path: Path, seconds: float, *, now: Now, monotonic: Callable[[], float]) -> Iterator[str]:
    """The lines of a recording of the supervisor at `path`, for so many seconds or until it ends."""
    deadline = monotonic() + seconds
    with converse(path) as conversation:
        yield _row(now(), conversation.lines[-1])
        while monotonic() < deadline:
            try:
                conversation.read(deadline)
            except NoSupervisor as over:
                if over.why.reason in (Reason.SILENT, Reason.NOT_RUNNING):
                    return
                raise
            yield _row(now(), conversation.lines[-1])
            conversation.lines.clear()


def _row(at: float, line: bytes) -> str:
    message: Any = json.loads(line)
    return json.dumps({"at": round(at, 3), "message": message}, separators=(",", ":")) + "\n"


def outcome(moments: list[Moment]) -> Snapshot:
    """What the supervisor had said by the end of a recording."""
    snapshot = Snapshot()
    for moment in moments:
        if isinstance(moment.message, Update):
            snapshot = apply(snapshot, moment.message.data, full=moment.message.full)
    return snapshot
