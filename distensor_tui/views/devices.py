"""The machine's devices: a gauge each on Home, a table on the Devices screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Device, Fault
from distensor_tui.scene import Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, cells, fill, join, line, spread, width
from distensor_tui.views import faults
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
    broken = view.snapshot.broken("device")
    rows = _rows(devices, {fault.subject: fault for fault in broken}, size, look)
    return Panel("Devices", "6", rows, note if devices else ())


def _missing(view: View) -> str:
    reason = view.snapshot.unavailable.get("devices")
    return f"Not available: {reason}" if reason else "Detecting devices..."


Faults = Mapping[str | None, Fault]


def _rows(devices: Sequence[Device], broken: Faults, size: int, look: Look) -> list[Line]:
    if not devices:
        return paragraph("No device was found. The supervisor's log says what was tried: press 7.", size, Tone.WARN)
    if look.narrow:
        return _short(devices, broken, size, look)
    return [row for device in devices for row in _long(device, broken.get(device.id), size, look)]


def _short(devices: Sequence[Device], broken: Faults, size: int, look: Look) -> list[Line]:
    """One row each: name, gauge, the figures that there are, each under those of the device above."""
    names = min(24, size // 3, max(cells(_name(device)) for device in devices))
    figures = [_figures(device) if device.usable else () for device in devices]
    widths = [max((width(row[i]) for row in figures if row), default=0) for i in range(len(FIGURES))]
    gauge = max(6, size // 8)
    rows: list[Line] = []
    for device, row in zip(devices, figures, strict=True):
        fault = broken.get(device.id)
        rows.append(_short_row(device, fault, names, gauge, _aligned(row, widths), look))
        if fault is not None:
            rows += faults.remedy(fault, size)
    return rows


def _short_row(device: Device, fault: Fault | None, names: int, gauge: int, figures: Line, look: Look) -> Line:
    name = Span(fill(_name(device), names) + "  ")
    if fault is not None:
        return line(name, (f"{look.glyphs.no} {fault.code}: {fault.cause}", Tone.BAD))
    if not device.usable:
        return line(name, (f"{look.glyphs.no} {_reason(device)}", Tone.WARN))
    share = bar(device.utilization, gauge, look.glyphs)
    return (name, *share, Span(f" {fmt.percent(device.utilization):>4}  "), *figures)


def _aligned(figures: Sequence[Line], widths: Sequence[int]) -> Line:
    """The figures of one device right-aligned in columns; a column that no device has takes no room."""
    padded = [
        (Span(" " * (size - width(figure))), *figure) for figure, size in zip(figures, widths, strict=False) if size
    ]
    return join(padded, Span("  "))


def _long(device: Device, fault: Fault | None, size: int, look: Look) -> list[Line]:
    """Name row, gauge row, figures row; below one that is broken what is wrong with it."""
    slots = f"{len(device.workers)}/{device.slots} slots" if device.slots else ""
    head = spread(line((_name(device), Tone.STRONG)), line((slots, Tone.DIM)), size)
    if fault is not None:
        return [head, *faults.rows([fault], size, look)]
    if not device.usable:
        return [head, *paragraph(f"{look.glyphs.no} not used: {_reason(device)}", size, Tone.WARN)[:LONGEST_REASON]]
    share = device.utilization
    gauge = bar(share, size - 6, look.glyphs)
    figures = join([figure for figure in _figures(device) if figure], Span("  "))
    return [head, (*gauge, Span(f" {fmt.percent(share):>5}", Tone.STRONG)), figures]


def _name(device: Device) -> str:
    if device.name and device.name.lower() != device.id.lower():
        return f"{short_id(device.id)}  {device.name}"
    return short_id(device.id)


def _reason(device: Device) -> str:
    return device.reason or "the supervisor gives no reason"


FIGURES = ("memory", "temperature", "power")


def _figures(device: Device) -> tuple[Line, ...]:
    """Memory, temperature, watts: empty what the machine cannot measure."""
    memory, heat, power = EMPTY, EMPTY, EMPTY
    if device.memory_total is not None or device.memory_used is not None:
        memory = line(("mem ", Tone.DIM), fmt.memory_pair(device.memory_used, device.memory_total))
    if device.temperature_c is not None:
        hot = Tone.WARN if device.temperature_c >= HOT_C else Tone.TEXT
        heat = line((f"{device.temperature_c:.0f} C", hot))
    if device.power_w is not None:
        limit = f"/{device.power_limit_w:.0f}" if device.power_limit_w is not None else ""
        power = line(f"{device.power_w:.0f}{limit} W")
    return memory, heat, power


COLUMNS = (
    Column("device", least=6),
    Column("name", least=10),
    Column("kind"),
    Column("state", least=10),
    Column("slots", right=True),
    Column("load", right=True),
    Column("memory", right=True),
    Column("temp", right=True),
    Column("power", right=True),
)
NARROW_CELLS = 90
"""Below, kind and slots are left to the details."""
WIDE_CELLS = 108
"""From here on load and memory have a bar each."""
BAR_CELLS = 10
SHORT_ID = 12
"""The first block of a UUID: enough to tell the cards of one machine apart; details and filter have all of it."""


def page(view: View, size: int, look: Look) -> list[Line]:
    """Header and one row per device."""
    devices = view.snapshot.devices or ()
    if size < NARROW_CELLS:
        narrow = [i for i, column in enumerate(COLUMNS) if column.title not in ("kind", "slots")]
        cells = [_cells(device, look) for device in devices]
        return table([COLUMNS[i] for i in narrow], [[row[i] for i in narrow] for row in cells], size)
    if size < WIDE_CELLS:
        return table(COLUMNS, [_cells(device, look) for device in devices], size)
    plain = table(COLUMNS, [_cells(device, look) for device in devices], size - 2 * (BAR_CELLS + 2))
    titles = line((fill("load", BAR_CELLS + 2), Tone.DIM), (fill("memory", BAR_CELLS), Tone.DIM))
    rows = [
        (
            *row,
            Span("  "),
            *_bar(device.utilization, device, look),
            Span("  "),
            *_bar(_memory_share(device), device, look),
        )
        for row, device in zip(plain[1:], devices, strict=True)
    ]
    return [(*plain[0], Span("  "), *titles), *rows]


def _bar(share: float | None, device: Device, look: Look) -> Line:
    return bar(share, BAR_CELLS, look.glyphs) if device.usable else line(" " * BAR_CELLS)


def _memory_share(device: Device) -> float | None:
    return device.memory_used / device.memory_total if device.memory_used is not None and device.memory_total else None


def _cells(device: Device, look: Look) -> list[Span | str]:
    return [
        Span(short_id(device.id), Tone.STRONG),
        device.name,
        device.kind,
        state(device, look),
        f"{len(device.workers)}/{device.slots}",
        fmt.percent(device.utilization),
        fmt.memory_pair(device.memory_used, device.memory_total),
        _temperature(device),
        "-" if device.power_w is None else f"{device.power_w:.0f} W",
    ]


def short_id(device_id: str) -> str:
    return device_id[:SHORT_ID] if device_id.startswith(("GPU-", "MIG-")) else device_id


def state(device: Device, look: Look) -> Span:
    """Glyph, word and colour; the reason when it is not used."""
    if not device.usable:
        return Span(f"{look.glyphs.no} {_reason(device)}", Tone.BAD if device.fault else Tone.WARN)
    if device.throttle:
        return Span(f"{look.glyphs.warn} slowed", Tone.WARN)
    word = "in use" if device.workers else "ready"
    return Span(f"{look.glyphs.ok} {word}", Tone.GOOD)


def _temperature(device: Device) -> Span | str:
    if device.temperature_c is None:
        return "-"
    return Span(f"{device.temperature_c:.0f} C", Tone.WARN if device.temperature_c >= HOT_C else Tone.TEXT)
