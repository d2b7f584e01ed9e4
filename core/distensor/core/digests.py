"""Hashes by which two processes compare what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def programs_digest(programs: Mapping[int, bytes]) -> str:
    """SHA-256 of StagePrograms as they are shipped, by stage; empty for none.

    >>> programs_digest({})
    ''
    """
    if not programs:
        return ""
    whole = hashlib.sha256()
    for stage, text in sorted(programs.items()):
        whole.update(f"{stage} {len(text)}\n".encode())
        whole.update(text)
    return whole.hexdigest()
