"""What goes into a bug report, redacted, and the archive made of it. Nothing is sent anywhere."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor.core.errors import StoreError
from distensor_server.redact import Redactor

LONGEST_LOG = 256 * 1024
"""The end of each log file is what tells most."""
MOST_LOGS = 20
FOLDER = "distensor-bugreport"
LOG_NAMES = ("server.log*", "logs/*")
SETTING_NAMES = ("*.toml",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of the report, already redacted."""

    name: str
    about: str
    content: bytes


def gather(
    redactor: Redactor,
    *,
    facts: Mapping[str, Any],
    environment: Mapping[str, str],
    checks: Sequence[Mapping[str, Any]],
    sections: Mapping[str, Any],
    settings: Iterable[Path],
    state: Path,
) -> list[Entry]:
    """All files. Identity, key and receipts are never opened."""
    entries = [
        _json(redactor, "versions.json", "versions of disTensor, Python and the system", facts),
        _json(redactor, "environment.json", "settings of the environment", redactor.environment(environment)),
        _json(redactor, "doctor.json", "what distensor doctor finds", {"checks": list(checks)}),
        _json(redactor, "sections.json", "what the supervisor shows, now or last", sections),
    ]
    entries += [_file(redactor, f"settings/{path.name}", "your settings", path) for path in _files(settings)]
    logs = [path for pattern in LOG_NAMES for path in sorted(state.glob(pattern))]
    newest = sorted(_files(logs), key=lambda path: path.stat().st_mtime, reverse=True)[:MOST_LOGS]
    entries += [_file(redactor, f"logs/{path.name}", "the end of a log", path) for path in sorted(newest)]
    return entries


def _files(paths: Iterable[Path]) -> list[Path]:
    """Ordinary files; a link could lead to anything."""
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _json(redactor: Redactor, name: str, about: str, value: Mapping[str, Any]) -> Entry:
    """Redacted value by value, so that what comes out is JSON still."""
    text = json.dumps(redacted(redactor, value), indent=1, sort_keys=True)
    return Entry(name=name, about=about, content=text.encode() + b"\n")


def redacted(redactor: Redactor, value: Any) -> Any:
    """A value of JSON with every text in it redacted, keys included."""
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, Mapping):
        return {
            redactor.text(str(name)): redactor.member(str(name), redacted(redactor, v)) for name, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(redactor, each) for each in value]
    return value


def _file(redactor: Redactor, name: str, about: str, path: Path) -> Entry:
    try:
        text = _tail(path)
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    return Entry(name=redactor.text(name), about=about, content=redactor.text(text).encode())


def _tail(path: Path) -> str:
    """The end of the file, from a whole line on: half a line could hold half a key."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LOG))
        raw = file.read(LONGEST_LOG)
    if size > LONGEST_LOG:
        raw = raw.partition(b"\n")[2]
    return raw.decode(errors="replace")


def pack(entries: Sequence[Entry], path: Path, *, at: float) -> None:
    """Write the archive with mode 0600. It must not exist: nothing of anybody's is overwritten.

    Raises:
        StoreError: it exists, or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with (
            os.fdopen(fd, "wb") as file,
            gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=at) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for entry in entries:
                archive.addfile(_info(entry, at), io.BytesIO(entry.content))
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def _info(entry: Entry, at: float) -> tarfile.TarInfo:
    """No name of a user or group of this machine."""
    info = tarfile.TarInfo(f"{FOLDER}/{entry.name[:90]}")
    info.size, info.mtime, info.mode = len(entry.content), int(at), 0o600
    return info
