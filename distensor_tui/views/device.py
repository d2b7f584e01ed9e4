"""The gauges above the facts of one device."""

from __future__ import annotations

from distensor_tui import format as fmt
from distensor_tui.model import Device
from distensor_tui.scene import Look
from distensor_tui.text import Line, Span, Tone, fill
from distensor_tui.views.devices import state
from distensor_tui.views.draw import bar

GAUGE_NAME = 14
GAUGE_TEXT = 22


def gauges(device: Device, size: int, look: Look) -> list[Line]:
    """State, and a bar for each reading that has a limit."""
    rows: list[Line] = [(Span(fill("state", GAUGE_NAME), Tone.DIM), state(device, look))]
    for name, value, limit, text in _shares(device):
        if value is None or not limit:
            continue
        room = max(8, size - GAUGE_NAME - GAUGE_TEXT - 2)
        share = value / limit
        tone = Tone.WARN if name == "temperature" and share >= 0.95 else Tone.ACCENT
        rows.append((Span(fill(name, GAUGE_NAME), Tone.DIM), *bar(share, room, look.glyphs, tone), Span(f"  {text}")))
    return rows


def _shares(device: Device) -> list[tuple[str, float | None, float | None, str]]:
    """Name, reading, what full means, and both in words."""
    return [
        ("load", device.utilization, 1.0, fmt.percent(device.utilization)),
        (
            "memory",
            device.memory_used,
            device.memory_total,
            fmt.memory_pair(device.memory_used, device.memory_total),
        ),
        (
            "temperature",
            device.temperature_c,
            device.temperature_limit_c,
            _of(device.temperature_c, device.temperature_limit_c, "C"),
        ),
        ("power", device.power_w, device.power_limit_w, _of(device.power_w, device.power_limit_w, "W")),
        ("clock", device.clock_mhz, device.clock_limit_mhz, _of(device.clock_mhz, device.clock_limit_mhz, "MHz")),
    ]


def _of(value: float | None, limit: float | None, unit: str) -> str:
    return "" if value is None or limit is None else f"{value:.0f} of {limit:.0f} {unit}"
