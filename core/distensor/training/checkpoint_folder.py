"""The folder of a run's checkpoints: `step-00000120/` and its like, each complete once its manifest is there.

"The latest" is never a file of its own: it is the complete checkpoint with the highest serial number. So a process may
be killed at any instant, and what was loadable before still is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distensor.core.errors import CheckpointError, ConfigError, StoreError
from distensor.training.checkpoint_manifest import MANIFEST, Manifest

LOCK = ".lock"
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A complete checkpoint on the disk."""

    path: Path
    manifest: Manifest


class CheckpointFolder:
    """One run's checkpoints. Reading needs no lock; `writing` is for one process at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def complete(self) -> list[Saved]:
        """All complete checkpoints, oldest first.

        Raises:
            CheckpointError: a manifest that is damaged or of a newer format; it says which.
        """
        found = [Saved(path=path, manifest=manifest) for path, manifest in self._manifests()]
        return sorted(found, key=lambda saved: saved.manifest.serial)

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        for path in self._candidates():
            try:
                text = (path / MANIFEST).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue  # not complete, or just deleted
            except OSError as error:
                raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
            yield path, Manifest.from_json(text, where=str(path / MANIFEST))

    def _candidates(self) -> list[Path]:
        try:
            return sorted(path for path in self.path.iterdir() if _NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"checkpoint folder {self.path} cannot be read: {error}") from error

    def find(self, step: int | None = None) -> Saved | None:
        """The latest complete checkpoint, or the newest one of `step`; None where there is none at all.

        Raises:
            ConfigError: there are some, and none of that step.
        """
        saved = self.complete()
        wanted = [each for each in saved if step is None or each.manifest.step == step]
        if saved and not wanted:
            steps = ", ".join(str(number) for number in sorted({each.manifest.step for each in saved}))
            raise ConfigError(f"{self.path} holds no checkpoint of step {step}; it holds steps {steps}")
        return wanted[-1] if wanted else None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps other processes from writing here; the lock of a killed process is free again.

        Raises:
            StoreError: another process writes here, or the folder cannot be made.
        """
        held = _hold(self.path)
        try:
            yield
        finally:
            _let_go(held)

    def sweep(self) -> None:
        """Remove what a killed process left incomplete. Only while `writing`."""
        for path in self._candidates():
            if not (path / MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """A new empty folder for a checkpoint of `step`; an earlier one of the same step stays as it is."""
        name, number = f"step-{step:08}", 0
        try:
            while True:
                path = self.path / (f"{name}.{number}" if number else name)
                if not path.exists():
                    path.mkdir()
                    return path
                number += 1
        except OSError as error:
            raise StoreError(f"checkpoint folder {self.path} cannot be used: {error}") from error

    def next_serial(self) -> int:
        saved = self.complete()
        return saved[-1].manifest.serial + 1 if saved else 1

    def commit(self, path: Path, manifest: Manifest) -> Saved:
        """Make the checkpoint complete: everything else in `path` is on the disk already.

        Raises:
            StoreError: the manifest cannot be written; the checkpoint is not complete.
        """
        partial = path / f"{MANIFEST}.partial"
        try:
            with partial.open("wb") as stream:
                stream.write(manifest.to_json())
                stream.flush()
                os.fsync(stream.fileno())
            _flush_folder(path)
            partial.replace(path / MANIFEST)
            _flush_folder(path)
            _flush_folder(self.path)
        except OSError as error:
            raise StoreError(f"{path / MANIFEST} cannot be written: {error}") from error
        return Saved(path=path, manifest=manifest)

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` complete checkpoints; each stops being complete before it loses a file."""
        for saved in self.complete()[: -max(1, keep)]:
            discard(saved.path)


def discard(path: Path) -> None:
    """Delete one checkpoint's folder, manifest first. Raises StoreError."""
    try:
        (path / MANIFEST).unlink(missing_ok=True)
        _flush_folder(path)
        shutil.rmtree(path)
    except OSError as error:
        raise StoreError(f"old checkpoint {path} cannot be deleted: {error}") from error


_locks: dict[Path, tuple[int, int]] = {}
"""Folders that this process writes to -> (descriptor, how many hold it). A process has one lock on a file, whoever
asks, and loses it when any descriptor of that file is closed."""

_guard = threading.Lock()


def _hold(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        key = path.resolve()
        with _guard:
            descriptor, holders = _locks.get(key) or (_lock(key), 0)
            _locks[key] = (descriptor, holders + 1)
    except OSError as error:
        raise StoreError(f"checkpoint folder {path} cannot be used: {error}") from error
    return key


def _let_go(key: Path) -> None:
    with _guard:
        descriptor, holders = _locks.pop(key)
        if holders > 1:
            _locks[key] = (descriptor, holders - 1)
        else:
            os.close(descriptor)


def _lock(path: Path) -> int:
    """A lock of the process, which a data loader's forked children do not inherit."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise StoreError(f"another trainer writes its checkpoints to {path}; give each a folder") from error
        raise
    return descriptor


def _flush_folder(path: Path) -> None:
    """A rename is on the disk once its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
