"""What all workers of an exchange use alike, where not all of them got the same. Pure.

An exchange has two rounds. In the first one contributions travel, and some may not come, or not in time. In the second
one, over connections that lose nothing, every worker says what it has; from these views all decide the same. A
contribution that is left out costs accuracy: its sender keeps it in its residual. It never costs consistency.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LACKING = 0
"""The digest of a worker that has no set."""


def used_by_all(views: Sequence[Sequence[bool]]) -> tuple[bool, ...]:
    """Which contributions are used: those that every worker has.

    Args:
        views: (workers, contributions): whether a worker has a contribution.
    """
    return tuple(all(had) for had in zip(*views, strict=True))


def digest_of(messages: Sequence[bytes | None]) -> int:
    """63 bits of SHA-256 over a set: which contributions are in it, and their bytes; never `LACKING`."""
    whole = hashlib.sha256()
    for message in messages:
        whole.update(b"-" if message is None else b"+%d " % len(message))
        whole.update(message or b"")
    return int.from_bytes(whole.digest()[:8]) >> 1 or 1


def is_same_for_all(digests: Sequence[int]) -> bool:
    """Whether every worker has a set, and all have the same one."""
    return LACKING not in digests and len(set(digests)) == 1
