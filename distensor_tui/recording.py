"""Recordings of a supervisor's stream: written from the real thing, played back with its own times.

One JSON object a line: {"at": unix seconds, "message": {...}}; the first may be {"about": {...}}: where it comes from.
Nothing in a recording is made up by this package. It holds what a supervisor shows, and that holds no secret.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor_tui import __version__
from distensor_tui.absence import Reason
from distensor_tui.client import Sink
from distensor_tui.clock import Now
from distensor_tui.model import Snapshot
from distensor_tui.once import NoSupervisor, converse
from distensor_tui.scene import Playing
from distensor_tui.sections import apply
from distensor_tui.wire import Answer, Hello, Message, Update, decode

ABOUT = '{"about":'


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
    rows = [(i, row) for i, row in enumerate(text.splitlines(), 1) if row.strip() and not row.startswith(ABOUT)]
    moments = [_moment(path, i, row) for i, row in rows]
    if not moments or not isinstance(moments[0].message, Hello):
        raise RecordingError(f"{path} is not a recording: its first message must be a supervisor's hello")
    return moments


def _moment(path: Path, number: int, row: str) -> Moment:
    try:
        raw = json.loads(row)
        return Moment(at=float(raw["at"]), message=decode(json.dumps(raw["message"])))
    except (ValueError, TypeError, KeyError) as error:
        raise RecordingError(f"{path} line {number} is not a moment of a recording: {error}") from error


SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
LOOKS_EVERY_S = 0.2
"""A player that waits looks so often whether it was told something else."""


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
        self._monotonic, self._since, self._at = monotonic, monotonic(), moments[0].at
        self._next, self._playing = 0, False
        self._speed, self._held = 1.0, False

    @property
    def speed(self) -> float:
        """Recorded seconds for each real one; 0 while it is held."""
        return 0.0 if self._held else self._speed

    def now(self) -> float:
        """The time inside the recording; it stands still at the end."""
        return min(self._at + (self._monotonic() - self._since) * self.speed, self._moments[-1].at)

    def control(self, what: Playing) -> bool:
        """Hold or go on, faster, slower, from the begin. True when it is over, so that `run` has to be called again."""
        self._at, self._since = self.now(), self._monotonic()
        if what is Playing.HOLD:
            self._held = not self._held
        elif what is Playing.AGAIN:
            self._at, self._next = self._moments[0].at, 0
        else:
            place = SPEEDS.index(self._speed) + (1 if what is Playing.FASTER else -1)
            self._speed = SPEEDS[min(max(0, place), len(SPEEDS) - 1)]
        return what is Playing.AGAIN and not self._playing

    async def run(self) -> None:
        self._playing = True
        self._at, self._since = self._moments[self._next].at, self._monotonic()
        while self._next < len(self._moments):
            wait = self._moments[self._next].at - self.now()
            if wait > 0:
                await self._sleep(min(wait / self.speed, LOOKS_EVERY_S) if self.speed else LOOKS_EVERY_S)
                continue
            self._next += 1
            self._play(self._moments[self._next - 1].message)
        self._playing = False
        self._ended()

    async def ask(self, method: str, params: Mapping[str, object] | None = None, within: float = 0.0) -> Answer:
        """A recording takes no orders."""
        return Answer(id="", ok=False, code="recording", message="This is a recording: it takes no requests")

    def _play(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._sink.on_hello(message)
        elif isinstance(message, Update):
            self._sink.on_update(message)


def record(path: Path, seconds: float, *, now: Now, monotonic: Callable[[], float]) -> Iterator[str]:
    """The lines of a recording of the supervisor at `path`, for so many seconds or until it ends."""
    deadline = monotonic() + seconds
    with converse(path) as conversation:
        about = {"made_by": "distensor record", "version": __version__, "at": round(now()), "seconds": seconds}
        yield json.dumps({"about": about}, separators=(",", ":")) + "\n"
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
