"""The last picture of the node, for who looks while the supervisor is away: one private file, replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distensor.core.clock import Clock
from distensor_server.sections import SCHEMA_VERSION, Sections
from distensor_server.statedir import write_json

EVERY_SECONDS = 30.0


class SnapshotFile:
    """`snapshot.json` in the state directory: {"v": 1, "schema_version": 1, "at": Unix time, "data": the sections}."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._written_at: float | None = None

    def keep(self, sections: Callable[[], Sections]) -> None:
        """Write unless the file is new enough. Raises StoreError."""
        now = self._clock.monotonic()
        if self._written_at is None or now - self._written_at >= EVERY_SECONDS:
            self.write(sections())

    def write(self, sections: Sections) -> None:
        """Raises StoreError; the next try is then as far away as after a success, a full disk needs no haste."""
        self._written_at = self._clock.monotonic()
        whole = {"v": 1, "schema_version": SCHEMA_VERSION, "at": round(self._clock.now()), "data": sections}
        write_json(self._path, whole, outlives_power=False)
