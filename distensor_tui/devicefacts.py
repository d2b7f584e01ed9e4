"""One device in full: who it is, every reading, who uses it, how fast it was measured, and why the rest is missing."""

from __future__ import annotations

from distensor_tui import format as fmt
from distensor_tui.model import Device, DeviceBenchmark, DeviceProcess

Facts = list[tuple[str, str]]


def facts(device: Device, now: float) -> Facts:
    """Everything that is known of one device; what is not says why."""
    readings = [(name, value) for name, value in _readings(device) if value]
    missing = [(_WORDS.get(name, name), f"not available: {why}") for name, why in sorted(device.unavailable.items())]
    return [*_identity(device), *readings, *_processes(device), *benchmark(device, now), *missing]


_WORDS = {
    "bus": "bus",
    "clock_limit_mhz": "clock limit",
    "clock_mhz": "clock",
    "energy_j": "energy",
    "memory_clock_mhz": "memory clock",
    "memory_total": "memory total",
    "memory_used": "memory used",
    "power_limit_w": "power limit",
    "power_w": "power",
    "temperature_c": "temperature",
    "temperature_limit_c": "heat limit",
    "utilization": "load",
}
"""Names of readings as people say them; the others are words already."""


def _identity(device: Device) -> Facts:
    facts = [
        ("device", device.id),
        ("name", device.name),
        ("kind", device.kind),
        ("usable", "yes" if device.usable else f"no: {device.reason or 'the supervisor gives no reason'}"),
        ("slots", f"{len(device.workers)} of {device.slots} taken"),
        ("workers", ", ".join(device.workers) or "none"),
    ]
    if device.parent:
        facts.append(("part of", f"{device.parent}, profile {device.profile or 'unknown'}"))
    return [*facts, *((name, value) for name, value in device.facts.items())]


def _readings(device: Device) -> Facts:
    """Empty texts where there is no reading: the reasons stand elsewhere."""
    shared = " (the machine's own)" if device.unified_memory else ""
    return [
        ("load", "" if device.utilization is None else fmt.percent(device.utilization)),
        (
            "memory",
            "" if device.memory_total is None else fmt.memory_pair(device.memory_used, device.memory_total) + shared,
        ),
        ("temperature", _with_limit(device.temperature_c, device.temperature_limit_c, "C", "slows down at")),
        ("power", _with_limit(device.power_w, device.power_limit_w, "W", "limit")),
        ("clock", _with_limit(device.clock_mhz, device.clock_limit_mhz, "MHz", "at most")),
        ("memory clock", "" if device.memory_clock_mhz is None else f"{device.memory_clock_mhz:.0f} MHz"),
        ("fan", "" if device.fan is None else fmt.percent(device.fan)),
        ("energy", "" if device.energy_j is None else f"{device.energy_j / 3.6e6:.2f} kWh since the driver was loaded"),
        ("held back by", "" if device.throttle is None else ", ".join(device.throttle) or "nothing"),
    ]


def _with_limit(value: float | None, limit: float | None, unit: str, words: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" + ("" if limit is None else f" ({words} {limit:.0f} {unit})")


def _processes(device: Device) -> Facts:
    if device.processes is None:
        return []
    return [("process", _process(process)) for process in device.processes] or [("process", "none")]


def _process(process: DeviceProcess) -> str:
    parts = [f"{process.pid} {process.name or '?'}", process.owner, process.type]
    if process.memory is not None:
        parts.append(fmt.memory(process.memory))
    if process.utilization is not None:
        parts.append(fmt.percent(process.utilization))
    return "  ".join(parts)


def benchmark(device: Device, now: float) -> Facts:
    """What was measured and how long ago."""
    found = device.benchmark
    if found is None:
        return (
            [("measured", "not yet: once when idle, or now (`distensor devices --benchmark`, or key m)")]
            if device.usable
            else []
        )
    old = ", and driver, torch or boot have changed since" if found.stale else ""
    rows = [(words, _rate(found, name, unit)) for name, words, unit in _MEASURES]
    return [("measured", f"{fmt.coarse(max(0.0, now - found.at))} ago{old}"), *((n, v) for n, v in rows if v)]


_MEASURES = (
    ("matmul_f32", "float32", "FLOP/s"),
    ("matmul_bf16", "bfloat16", "FLOP/s"),
    ("memory", "memory rate", "B/s"),
    ("disk_write", "disk write", "B/s"),
    ("disk_read", "disk read", "B/s"),
)


def _rate(found: DeviceBenchmark, name: str, unit: str) -> str:
    for key in (f"{name}_p50", name):
        if key in found.missing:
            return f"not available: {found.missing[key]}"
    if name in found.rates:
        return _scaled(found.rates[name], unit)
    low, middle = found.rates.get(f"{name}_p10"), found.rates.get(f"{name}_p50")
    if low is None or middle is None:
        return ""
    return f"{_scaled(middle, unit)} (at least {_scaled(low, unit)} in 9 of 10 runs)"


def _scaled(value: float, unit: str) -> str:
    """Steps of 1000, as rates of hardware are told."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
