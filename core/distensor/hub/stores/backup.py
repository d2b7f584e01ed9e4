"""A hub in one file: its tables and the files of its state directory, as lines of JSON, compressed.

    {"v": 1, "revision": "0003"}
    {"file": "authority.pem", "content": base64}
    {"table": "nodes", "columns": ["node_id", ...]}
    ["n_a", ...]                                        one line for each row
    {"end": true, "rows": 12, "sha256": of all lines before}

The same for both databases, so a hub can move from one to the other. What triggers keep (balances, sums by the hour) is
made anew by them and compared with nothing else than the entries it comes from.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distensor.core.errors import StoreError
from distensor.hub.pki import write_private
from distensor.hub.stores.migrations.upgrade import require_known

FORMAT = 1
KEPT_BY_TRIGGERS = frozenset({"balances", "hourly", "alembic_version"})
NOT_KEPT = frozenset({"lock", "hub.sqlite", "hub.sqlite-wal", "hub.sqlite-shm"})


class Archive(Protocol):
    """What a backup needs of a database."""

    def revision(self) -> str: ...

    def tables(self) -> list[tuple[str, tuple[str, ...]]]:
        """Names and columns, each table after those that it refers to."""

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[Sequence[Any]]: ...

    def prepare(self, revision: str) -> None:
        """Make the tables of that version. Raises: StoreError: there are tables already."""

    def insert(self, table: str, columns: Sequence[str], rows: Iterator[Sequence[Any]]) -> None: ...

    def finish(self) -> None:
        """Commit, and lead the tables to the newest version."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BackedUp:
    """What a backup holds."""

    files: int
    tables: int
    rows: int


class _Writer:
    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def line(self, value: object) -> None:
        data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        self._hash.update(data)
        self._stream.write(data)

    def end(self, rows: int) -> None:
        self.line({"end": True, "rows": rows, "sha256": self._hash.hexdigest()})


def write_backup(archive: Archive, state: Path, target: Path) -> BackedUp:
    """Write a backup of one moment, while the hub runs or not. The target appears when it is whole.

    Raises:
        StoreError: the target is there already or cannot be written, or the database cannot be read.
    """
    if target.exists():
        raise StoreError(f"backup {target}: there is a file already; choose another name")
    part = target.with_name(target.name + ".part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as raw:
            with gzip.GzipFile(fileobj=raw, mode="wb") as stream:
                done = _write(archive, state, _Writer(stream))
            raw.flush()
            os.fsync(raw.fileno())
        part.rename(target)
    except OSError as error:
        raise StoreError(f"backup {target}: {error}") from error
    finally:  # it holds the authority's key: whatever went wrong, nothing of it stays
        part.unlink(missing_ok=True)
    return done


def _write(archive: Archive, state: Path, out: _Writer) -> BackedUp:
    out.line({"v": FORMAT, "revision": archive.revision()})
    files = sorted(path for path in state.iterdir() if path.is_file() and path.name not in NOT_KEPT)
    for path in files:
        out.line({"file": path.name, "content": base64.b64encode(path.read_bytes()).decode()})
    count = 0
    tables = [one for one in archive.tables() if one[0] not in KEPT_BY_TRIGGERS]
    for table, columns in tables:
        out.line({"table": table, "columns": columns})
        for row in archive.rows(table, columns):
            out.line(list(row))
            count += 1
    out.end(count)
    return BackedUp(files=len(files), tables=len(tables), rows=count)


def restore(source: Path, state: Path, archive_of: Callable[[], Archive]) -> BackedUp:
    """Make the hub of a backup in an empty state directory and an empty database.

    Everything is read once before anything is written, so a damaged backup leaves nothing behind.

    Raises:
        StoreError: the backup is damaged, incomplete or newer; or there is a hub already.
    """
    if state.exists() and any(state.iterdir()):
        raise StoreError(f"state directory {state} is not empty: a backup is restored into a new one")
    done = _check(source)
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = _lines(source)
        with closing(archive_of()) as archive:
            archive.prepare(next(lines)["revision"])
            _fill(lines, state, archive)
            archive.finish()
    except OSError as error:
        raise StoreError(f"state directory {state}: {error}") from error
    return done


def _fill(lines: Iterator[Any], state: Path, archive: Archive) -> None:
    line = next(lines)
    while "end" not in line:
        if "file" in line:
            write_private(state / line["file"], base64.b64decode(line["content"]))
            line = next(lines)
        else:
            rows = _Rows(lines)
            archive.insert(line["table"], line["columns"], iter(rows))
            line = rows.after


class _Rows:
    """The rows of one table; `after` is the line that ended them."""

    def __init__(self, lines: Iterator[Any]) -> None:
        self._lines = lines
        self.after: Any = None

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for line in self._lines:
            if not isinstance(line, list):
                self.after = line
                return
            yield line


def _lines(source: Path) -> Iterator[Any]:
    with gzip.open(source, "rb") as stream:
        for line in stream:
            yield json.loads(line)


def _check(source: Path) -> BackedUp:
    """Read all of it: form, count and hash."""
    counts = {"file": 0, "table": 0, "row": 0}
    digest, last, first = hashlib.sha256(), {}, True
    try:
        with gzip.open(source, "rb") as stream:
            for data in stream:
                if "end" in last:
                    raise StoreError(f"backup {source}: lines after its end")
                last = _check_line(json.loads(data), counts, first=first, source=source)
                first = False
                if "end" not in last:
                    digest.update(data)
    except (OSError, EOFError, ValueError, binascii.Error, KeyError, TypeError) as error:
        raise StoreError(f"backup {source} is damaged or none: {error}") from error
    if "end" not in last:
        raise StoreError(f"backup {source} is incomplete: its last line is missing")
    if last.get("sha256") != digest.hexdigest() or last.get("rows") != counts["row"]:
        raise StoreError(f"backup {source} is damaged: its lines are not those that were written")
    return BackedUp(files=counts["file"], tables=counts["table"], rows=counts["row"])


def _check_line(line: Any, counts: dict[str, int], *, first: bool, source: Path) -> dict[str, Any]:
    if first:
        if not isinstance(line, dict) or line.get("v") != FORMAT:
            raise StoreError(f"backup {source}: format {line.get('v')!r} is not known; this hub reads {FORMAT}")
        require_known(str(line["revision"]), f"in backup {source}")
        return line
    if isinstance(line, list):
        counts["row"] += 1
        return {}
    if "file" in line:
        if Path(line["file"]).name != line["file"]:
            raise StoreError(f"backup {source}: {line['file']!r} is no plain file name")
        base64.b64decode(line["content"], validate=True)
        counts["file"] += 1
    elif "table" in line:
        counts["table"] += 1
    return dict(line)
