"""A moment to come, as people write one: 18:00, 90m, 2h, 1d."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, tzinfo

from distensor_tui.clock import local

_MOMENT = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_LENGTH = re.compile(r"(\d{1,5})(m|h|d)")
_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}


def moment(text: str, now: float, zone: tzinfo | None) -> float | None:
    """'18:00' is today or tomorrow, '90m', '2h', '1d' from now; None for anything else."""
    if length := _LENGTH.fullmatch(text):
        return now + int(length[1]) * _UNITS[length[2]] or None if int(length[1]) else None
    found = _MOMENT.fullmatch(text)
    if not found:
        return None
    here = local(now, zone)
    wanted = here.replace(hour=int(found[1]), minute=int(found[2]), second=0, microsecond=0)
    return (wanted if wanted > here else _next_day(wanted)).timestamp()


def _next_day(at: datetime) -> datetime:
    return at + timedelta(days=1)
