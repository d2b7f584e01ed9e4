"""How many streams a process may have open."""

from __future__ import annotations

import resource

_OWN = 100
"""What a hub itself has open: its books, its server, standard files."""


def room_for_streams() -> int | None:
    """Raise the limit of open files as far as this user may; for how many streams it is enough, None for any number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):  # macOS says 'unlimited' and means less
            hard = soft
    return None if hard == resource.RLIM_INFINITY else max(0, hard - _OWN)


def too_few(room: int | None, nodes: int) -> str:
    """What to tell an operator whose hub knows more nodes than it can have streams; nothing where there is room."""
    if room is None or nodes < room:
        return ""
    return (
        f"this process may have streams of {room} nodes, and {nodes} are known: raise the limit of open files "
        "(LimitNOFILE= of systemd, ulimit -n)"
    )
