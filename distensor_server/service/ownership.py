"""Whose a unit file is: ours, ours changed by hand, or somebody else's. Only the first is ever written over."""

from __future__ import annotations

import re
from enum import Enum, auto

from distensor_server.service.manifest import digest

_MARK = "distensor service install, sha256 of the other lines "
_LINE = re.compile(re.escape(_MARK) + r"([0-9a-f]{64})")


class Owner(Enum):
    """Who wrote what is in a file."""

    NOBODY = auto()
    """There is no such file."""
    US = auto()
    CHANGED = auto()
    """We wrote it and somebody changed it since."""
    OTHERS = auto()


def marked(content: str, *, after: int, comment: tuple[str, str]) -> str:
    """`content` with a line that says who wrote it, behind its first `after` lines; `comment` encloses it."""
    lines = content.splitlines(keepends=True)
    mark = f"{comment[0]}{_MARK}{digest(content.encode())}{comment[1]}\n"
    return "".join([*lines[:after], mark, *lines[after:]])


def owner_of(content: str | None) -> Owner:
    """Who wrote `content`, the text of a unit file; None when there is no file."""
    if content is None:
        return Owner.NOBODY
    lines = content.splitlines(keepends=True)
    for i in range(len(lines)):
        if found := _LINE.search(lines[i]):
            rest = "".join([*lines[:i], *lines[i + 1 :]])
            return Owner.US if digest(rest.encode()) == found[1] else Owner.CHANGED
    return Owner.OTHERS
