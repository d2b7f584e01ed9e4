"""The machine's devices: a gauge each on Home, a table on the Devices screen."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Device, DeviceProcess
from distensor_tui.scene import Look, View
from distensor_tui.text import Line, Span, Tone, fill, join, line, spread
from distensor_tui.views.draw import Column, Panel, bar, paragraph, table

HOT_C = 85.0
LONGEST_REASON = 3


def panel(view: View, size: int, look: Look) -> Panel:
    devices = view.snapshot.devices
    if devices is None:
        rows = paragraph(_missing(view), size, Tone.DIM)
        return Panel("Devices", "6", rows)
    usable = sum(device.usable for device in devices)
    note = line((f"{usable}/{len(devices)} usable", Tone.DIM if usable else Tone.WARN))
    return Panel("Devices", "6", _rows(devices, size, look), note if devices else ())


def _missing(view: View) -> str:
    reason = view.snapshot.unavailable.get("devices")
    return f"Not available: {reason}" if reason else "Detecting devices..."


def _rows(devices: Sequence[Device], size: int, look: Look) -> list[Line]:
    if not devices:
        return paragraph("No device was found. The supervisor's log says what was tried: press 7.", size, Tone.WARN)
    draw = _short if look.narrow else _long
    return [row for device in devices for row in draw(device, size, look)]


def _short(device: Device, size: int, look: Look) -> list[Line]:
    """One row: name, gauge, the figures that there are."""
    name = Span(fill(_name(device), min(24, size // 3)) + " ")
    if not device.usable:
        return [line(name, (f"{look.glyphs.no} {_reason(device)}", Tone.WARN))]
    gauge = bar(device.utilization, max(6, size // 8), look.glyphs)
    return [(name, *gauge, Span(f" {fmt.percent(device.utilization):>4}  "), *_figures(device))]


def _long(device: Device, size: int, look: Look) -> list[Line]:
    """Name row, gauge row, figures row."""
    slots = f"{len(device.workers)}/{device.slots} slots" if device.slots else ""
    head = spread(line((_name(device), Tone.STRONG)), line((slots, Tone.DIM)), size)
    if not device.usable:
        return [head, *paragraph(f"{look.glyphs.no} not used: {_reason(device)}", size, Tone.WARN)[:LONGEST_REASON]]
    share = device.utilization
    gauge = bar(share, size - 6, look.glyphs)
    return [head, (*gauge, Span(f" {fmt.percent(share):>5}", Tone.STRONG)), _figures(device)]


def _name(device: Device) -> str:
    if device.name and device.name.lower() != device.id.lower():
        return f"{device.id}  {device.name}"
    return device.id


def _reason(device: Device) -> str:
    return device.reason or "the supervisor gives no reason"


def _figures(device: Device) -> Line:
    """Memory, temperature, watts: only what the machine can measure."""
    parts = []
    if device.memory_total is not None or device.memory_used is not None:
        parts.append(line(("mem ", Tone.DIM), fmt.memory_pair(device.memory_used, device.memory_total)))
    if device.temperature_c is not None:
        hot = Tone.WARN if device.temperature_c >= HOT_C else Tone.TEXT
        parts.append(line((f"{device.temperature_c:.0f} C", hot)))
    if device.power_w is not None:
        limit = f"/{device.power_limit_w:.0f}" if device.power_limit_w is not None else ""
        parts.append(line(f"{device.power_w:.0f}{limit} W"))
    return join(parts, Span("  "))


COLUMNS = (
    Column("device", least=6),
    Column("name", least=10),
    Column("kind"),
    Column("state", least=8),
    Column("slots", right=True),
    Column("load", right=True),
    Column("memory", right=True),
    Column("temp", right=True),
    Column("power", right=True),
)


def page(view: View, size: int) -> list[Line]:
    """Header and one row per device."""
    return table(COLUMNS, [_cells(device) for device in view.snapshot.devices or ()], size)


def _cells(device: Device) -> list[Span | str]:
    state = Span("usable", Tone.GOOD) if device.usable else Span(_reason(device), Tone.WARN)
    return [
        Span(device.id, Tone.STRONG),
        device.name,
        device.kind,
        state,
        f"{len(device.workers)}/{device.slots}",
        fmt.percent(device.utilization),
        fmt.memory_pair(device.memory_used, device.memory_total),
        "-" if device.temperature_c is None else f"{device.temperature_c:.0f} C",
        "-" if device.power_w is None else f"{device.power_w:.0f} W",
    ]


def detail(device: Device) -> list[tuple[str, str]]:
    """Everything that is known of one device; what is not says why."""
    readings = [(name, value) for name, value in _readings(device) if value]
    missing = [(_WORDS.get(name, name), f"not available: {why}") for name, why in sorted(device.unavailable.items())]
    return [*_identity(device), *readings, *_processes(device), *missing]


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


def _identity(device: Device) -> list[tuple[str, str]]:
    facts = [
        ("device", device.id),
        ("name", device.name),
        ("kind", device.kind),
        ("usable", "yes" if device.usable else f"no: {_reason(device)}"),
        ("slots", f"{len(device.workers)} of {device.slots} taken"),
        ("workers", ", ".join(device.workers) or "none"),
    ]
    if device.parent:
        facts.append(("part of", f"{device.parent}, profile {device.profile or 'unknown'}"))
    return [*facts, *((name, value) for name, value in device.facts.items())]


def _readings(device: Device) -> list[tuple[str, str]]:
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


def _processes(device: Device) -> list[tuple[str, str]]:
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
