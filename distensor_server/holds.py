"""The owner's pause and drain: kept in a file, because a pause that a restart ends is no pause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor_server.localserver import RequestError
from distensor_server.picture import Hold, HoldKind
from distensor_server.statedir import read_json, remove, write_json


def load_hold(path: Path, now: float) -> Hold | None:
    stored = read_json(path) or {}
    until = stored.get("until")
    if stored.get("kind") not in tuple(HoldKind) or not isinstance(until, int | float | None):
        return None
    hold = Hold(kind=HoldKind(stored["kind"]), until=until, lasts=stored.get("lasts") is True)
    return None if is_over(hold, now) else hold


def save_hold(path: Path, hold: Hold | None) -> None:
    if hold is None:
        remove(path)
    else:
        write_json(path, {"v": 1, "kind": hold.kind.value, "until": hold.until, "lasts": hold.lasts})


def is_over(hold: Hold, now: float) -> bool:
    return hold.until is not None and hold.until <= now


def parse_pause(params: Mapping[str, Any], now: float) -> Hold:
    """{"seconds": 3600}, {"until": unix time} or {} for 'until resumed'."""
    unknown = params.keys() - {"seconds", "until"}
    if unknown or len(params) > 1:
        raise RequestError(
            code="bad_params", message=f"pause does not take {', '.join(sorted(params))} together", fix=_PAUSE_FIX
        )
    seconds, until = params.get("seconds"), params.get("until")
    if seconds is not None:
        return Hold(kind=HoldKind.PAUSE, until=now + _positive("seconds", seconds), lasts=True)
    if until is None:
        return Hold(kind=HoldKind.PAUSE)
    if _positive("until", until) <= now:
        raise RequestError(code="bad_params", message=f"until = {until!r} is in the past", fix=_PAUSE_FIX)
    return Hold(kind=HoldKind.PAUSE, until=float(until))


def parse_drain(params: Mapping[str, Any], default: float) -> float:
    """{} or {"seconds": 90}: how long running work may take to finish."""
    unknown = params.keys() - {"seconds"}
    if unknown:
        raise RequestError(code="bad_params", message=f"drain does not take {', '.join(sorted(unknown))}")
    return _positive("seconds", params["seconds"]) if "seconds" in params else default


_PAUSE_FIX = 'use {"seconds": 3600}, {"until": <unix time>} or {}'


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e11:
        raise RequestError(code="bad_params", message=f"{name} = {value!r:.40}, expected a number above 0")
    return float(value)
