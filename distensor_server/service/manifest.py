"""The list of everything that an installation made, in the order in which it was made; uninstalling reads it backwards.

The installer (a shell script) and `distensor service` write it, `uninstall.sh` reads it, so it is plain lines:
`KIND<TAB>PATH[<TAB>SHA256]`. A line is written before the thing is made: what was interrupted is listed, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from distensor.core.errors import StoreError

NAME = "installed.manifest"


class Kind(StrEnum):
    """How a path is removed."""

    DIRECTORY = "dir"
    """A folder that was not there before: only when it is empty."""
    TREE = "tree"
    """A folder with all that is in it: program files only."""
    LINK = "link"
    """A symbolic link: only while it points into a tree of ours."""
    FILE = "file"
    """A file: only with the content that we wrote."""
    KEPT = "kept"
    """What belongs to the owner (identity, receipts, settings): only with --purge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line."""

    kind: Kind
    path: Path
    sha256: str = ""

    def line(self) -> str:
        if "\n" in str(self.path) or "\t" in str(self.path):
            raise StoreError(f"{str(self.path)!r} cannot be installed to: its name has a line break or a tab")
        return "\t".join([self.kind, str(self.path), *([self.sha256] if self.sha256 else [])])


class Manifest:
    """The file. Without one (a source tree, a plain `pip install`) nothing is recorded by anybody else either."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> Iterator[Entry]:
        """Lines that this version does not understand are passed over: a newer one may have written them."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.path} cannot be read: {error}") from error
        for line in lines:
            kind, _, rest = line.partition("\t")
            path, _, sha256 = rest.partition("\t")
            if kind in set(Kind) and path.startswith("/"):
                yield Entry(kind=Kind(kind), path=Path(path), sha256=sha256)

    def record(self, entry: Entry) -> None:
        """Add a line, instead of an older one of the same path. Creates the file and its folder."""
        kept = [old for old in self.entries() if old.path != entry.path]
        self._write([*kept, entry])

    def forget(self, path: Path) -> None:
        """Take the lines of `path` out; the file goes with its last line."""
        before = list(self.entries())
        after = [entry for entry in before if entry.path != path]
        if len(after) != len(before):
            self._write(after)

    def _write(self, entries: list[Entry]) -> None:
        text = "".join(entry.line() + "\n" for entry in entries)
        new = self.path.with_name(self.path.name + ".new")
        try:
            if not entries:
                self.path.unlink(missing_ok=True)
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            new.replace(self.path)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def missing_folders(path: Path) -> list[Path]:
    """The folders above `path` that do not exist yet, the outermost first."""
    missing = []
    for folder in path.parents:
        if folder.exists():
            break
        missing.append(folder)
    return missing[::-1]
