"""The supervisor's directory: one owner at a time, files written whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from distensor.core.errors import SessionError, StoreError

CREDENTIAL_FILE = "credential.json"
"""The identity that the hub gave."""


class StateDirectory:
    """Paths below one directory, which only this supervisor uses as long as the lock is held."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock_fd: int | None = None

    @property
    def credential(self) -> Path:
        return self.root / CREDENTIAL_FILE

    @property
    def workers(self) -> Path:
        return self.root / "workers.json"

    @property
    def totals(self) -> Path:
        return self.root / "totals.json"

    @property
    def hold(self) -> Path:
        return self.root / "hold.json"

    @property
    def receipts(self) -> Path:
        return self.root / "receipts"

    @property
    def own_log(self) -> Path:
        return self.root / "server.log"

    @property
    def snapshot(self) -> Path:
        return self.root / "snapshot.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def open(self) -> None:
        """Create what is missing and take the lock.

        Raises:
            StoreError: the directory cannot be created or written.
            SessionError: another supervisor has it.
        """
        try:
            for path in (self.root, self.receipts, self.logs):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"state directory {self.root}: {error.strerror}; give another by --state") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise SessionError(
                f"state directory {self.root} is in use by another supervisor (process {owner or 'unknown'}); "
                "stop that one first, or give this one its own --state"
            ) from error
        self._lock_fd = fd
        with contextlib.suppress(OSError):  # only for the words of the message above; a full disk does not matter
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def set_aside_damaged(self) -> list[Path]:
        """Move every file of ours away that a crash of the disk tore; returns their former paths.

        The credential is left: its reader says what to do about it.
        """
        damaged = [
            path
            for path in sorted(self.root.glob("*.json"))
            if path != self.credential and path.is_file() and read_json(path) is None
        ]
        for path in damaged:
            with contextlib.suppress(OSError):
                path.replace(path.with_name(f"{path.name}.damaged"))
        return damaged

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is no such file or it does not hold one (no reason to stop)."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, Any], *, outlives_power: bool = True) -> None:
    """Replace `path` as `write_text` does.

    Raises:
        StoreError: it cannot be written.
    """
    write_text(path, json.dumps(value), outlives_power=outlives_power)


def write_text(path: Path, text: str, *, outlives_power: bool = True) -> None:
    """Replace `path` as a whole: a crash leaves the old or the new file, never half of one.

    What a power cut makes meaningless need not wait for the disk: `outlives_power=False`.

    Raises:
        StoreError: it cannot be written.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if outlives_power:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
