"""What a benchmark found, and for which machine state it holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.answers import Answer, missing

RATES = ("matmul_f32", "matmul_bf16", "memory")
"""Told as p10 and p50: floating-point operations a second, bytes a second."""
PLAIN_RATES = ("disk_write", "disk_read")
"""Bytes a second."""
NAMES = (*(f"{name}_{share}" for name in RATES for share in ("p10", "p50")), *PLAIN_RATES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One measurement of one device. `key` names what it depends on: device, driver, torch and boot."""

    key: str
    at: float
    """Unix time."""
    rates: Mapping[str, Reading[float]] = field(default_factory=dict)
    stale: bool = False
    """Something of its key has changed since; a new measurement is due."""


def from_answer(answer: Answer, key: str, at: float) -> Benchmark:
    """A child that failed leaves a benchmark without rates, each with the reason, so that it is not tried for ever."""
    if isinstance(answer, Unavailable):
        return Benchmark(key=key, at=at, rates=dict.fromkeys(NAMES, answer))
    return Benchmark(
        key=key, at=at, rates={**_shares(answer), **{name: _rate(answer.get(name)) for name in PLAIN_RATES}}
    )


def _shares(answer: Mapping[str, Any]) -> dict[str, Reading[float]]:
    found: dict[str, Reading[float]] = {}
    for name in RATES:
        value = answer.get(name)
        for share in ("p10", "p50"):
            inner = value.get(share, value) if isinstance(value, dict) else value
            found[f"{name}_{share}"] = _rate(inner)
    return found


def _rate(value: Any) -> Reading[float]:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e24:
        return float(value)
    return missing(value)


def to_json(benchmark: Benchmark) -> dict[str, Any]:
    """For the file, and for the section: a rate that is not available is an object with the reason."""
    rates = {
        name: {"unavailable": value.reason} if isinstance(value, Unavailable) else _digits(value)
        for name, value in benchmark.rates.items()
    }
    return {"key": benchmark.key, "at": round(benchmark.at), "rates": rates}


def from_json(stored: Any) -> Benchmark | None:
    """None for what is torn or strange: it is measured again."""
    try:
        rates = {name: _rate(stored["rates"][name]) for name in NAMES}
        return Benchmark(key=str(stored["key"]), at=float(stored["at"]), rates=rates)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _digits(value: float) -> float:
    """Four digits: more are noise."""
    return float(f"{value:.4g}")
