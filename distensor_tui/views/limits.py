"""The panel Limits: what keeps work away, what the owner allows, and how much of it is used now."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Gate, Limits, Setting, Snapshot
from distensor_tui.scene import Look, View
from distensor_tui.settings import number_of, value_of
from distensor_tui.text import Line, Span, Tone, cells, fill, line, wrap
from distensor_tui.views import faults
from distensor_tui.views.draw import Panel, paragraph
from distensor_tui.views.gates import label, next_change, row

LABEL = 8
GB, MB = 1e9, 1e6
NEARLY = 0.9
LONGEST_GATE = 3
CAPS = (
    ("temperature_max_c", "temp <= {} C"),
    ("power_max_w", "power <= {} W"),
    ("vram_reserve_gib", "vram {} GiB kept"),
    ("ram_reserve_gib", "ram {} GiB kept"),
    ("disk_reserve_gib", "disk {} GiB kept"),
)
"""Limits that a number sets; 0 sets none."""
SWITCHES = (
    ("only_when_idle", "true", "only when idle"),
    ("run_on_battery", "false", "not on battery"),
    ("run_on_metered", "false", "not on a metered network"),
)


def panel(view: View, size: int, look: Look) -> Panel:
    node, snapshot = view.snapshot.node, view.snapshot
    if node is None:
        return Panel("Limits", "5", paragraph("Waiting for the supervisor...", size, Tone.DIM))
    closed = [gate for gate in node.why if not gate.open]
    opened = [gate for gate in node.why if gate.open]
    note = line((f"{len(closed)} closed", Tone.WARN)) if closed else line(("all open", Tone.DIM))
    if not node.why:
        return Panel("Limits", "5", paragraph("The supervisor names no gates.", size, Tone.DIM))
    head = [part for gate in closed for part in _closed(gate, size, look)] or _allowed(opened, look)
    rows = [*head, *_caps(snapshot.limits, size), *_traffic(snapshot), *_slowed(snapshot)]
    rows += faults.rows([*faults.failed(snapshot, "limits"), *faults.failed(snapshot, "usage")], size, look)
    rows += [row(gate, look) for gate in opened] if look.wide else []
    return Panel("Limits", "5", rows, note)


def _closed(gate: Gate, size: int, look: Look) -> list[Line]:
    """A gate that keeps work away, when it opens, and its limit; the first rows of it, for `w` shows all."""
    limit = f" (limit: {gate.limit})" if gate.limit else ""
    when = f", {next_change(gate, look)}" if gate.next_change_at is not None else ""
    found = wrap(f"{label(gate)}: {gate.reading}{when}{limit}", size - 3)
    if len(found) > LONGEST_GATE:
        found = [*found[: LONGEST_GATE - 1], found[LONGEST_GATE - 1] + look.glyphs.ellipsis]
    first, *others = found
    rest = [line("  ", (other, Tone.WARN)) for other in others]
    return [line((f"{look.glyphs.no} ", Tone.WARN), (first, Tone.WARN)), *rest]


def _labelled(name: str, value: Line) -> Line:
    return (Span(fill(name, LABEL) + " ", Tone.DIM), *value)


def _allowed(gates: Sequence[Gate], look: Look) -> list[Line]:
    """Nothing is in the way; what closes first, and when."""
    coming = [gate for gate in gates if gate.next_change_at is not None]
    if not coming:
        return [_labelled("work", line(("allowed", Tone.GOOD)))]
    first = min(coming, key=lambda gate: gate.next_change_at or 0.0)
    said = f"  {next_change(first, look)} ({label(first)})"
    return [_labelled("work", line(("allowed", Tone.GOOD), (said, Tone.ACCENT)))]


def _caps(limits: Limits | None, size: int) -> list[Line]:
    """What the owner allows, as many on a row as fit."""
    if limits is None:
        return []
    found = [text for setting in limits.rows if (text := _cap(setting))]
    if not found:
        return [_labelled("caps", line(("none set; 5, then e, sets one", Tone.DIM)))]
    rows = [""]
    for text in found:
        longer = f"{rows[-1]}  {text}" if rows[-1] else text
        if cells(longer) <= size - LABEL - 1 or not rows[-1]:
            rows[-1] = longer
        else:
            rows.append(text)
    return [_labelled("caps" if i == 0 else "", line(text)) for i, text in enumerate(rows)]


def _cap(setting: Setting) -> str:
    where = f" on {setting.device}" if setting.device else ""
    if setting.key == "schedule" and setting.value:
        return f"{setting.value}{where}"
    for key, form in CAPS:
        if setting.key == key and (number_of(setting) or setting.device):
            return (form.format(setting.value) if number_of(setting) else f"no {key}") + where
    return next((text + where for key, value, text in SWITCHES if (setting.key, setting.value) == (key, value)), "")


def rates(snapshot: Snapshot) -> tuple[float, float]:
    """Bytes per second that this node's workers send and receive."""
    links = [link for job in snapshot.live_jobs for link in job.links]
    return sum(link.sent_rate or 0.0 for link in links), sum(link.received_rate or 0.0 for link in links)


def _traffic(snapshot: Snapshot) -> list[Line]:
    """Rates and sums beside their limits."""
    up, down = rates(snapshot)
    most_up, most_down = (value_of(snapshot.limits, key) * MB for key in ("upload_max_mb_s", "download_max_mb_s"))
    rows = [_pairs("traffic", [("up", _rate(up, most_up)), ("down", _rate(down, most_down))])]
    if (usage := snapshot.usage) is not None:
        day = _moved(usage.bytes_day, value_of(snapshot.limits, "bytes_day_gb") * GB)
        month = _moved(usage.bytes_month, value_of(snapshot.limits, "bytes_month_gb") * GB)
        rows.append(_pairs("moved", [("day", day), ("month", month)]))
    return rows


def _pairs(name: str, parts: Sequence[tuple[str, tuple[str, Tone]]]) -> Line:
    spans = [span for word, value in parts for span in ((f"{word} ", Tone.DIM), value, "  ")]
    return _labelled(name, line(*spans[:-1]))


def _rate(value: float, most: float) -> tuple[str, Tone]:
    """'12 kB/s', or '0.9/5 MB/s' where there is a limit."""
    text = f"{value / MB:.1f}/{most / MB:g} MB/s" if most else fmt.rate(value)
    return text, _tone(value, most)


def _moved(value: float, most: float) -> tuple[str, Tone]:
    text = f"{value / GB:.2f}" if value < 10 * GB else f"{value / GB:,.0f}"
    return f"{text}/{most / GB:g} GB" if most else f"{text} GB", _tone(value, most)


def _tone(value: float, most: float) -> Tone:
    return Tone.WARN if most and value >= NEARLY * most else Tone.TEXT


def _slowed(snapshot: Snapshot) -> list[Line]:
    return [
        _labelled("slowed", line((f"{device} works {fmt.percent(factor)} of its time", Tone.WARN)))
        for device, factor in slowed(snapshot).items()
    ]


def slowed(snapshot: Snapshot) -> dict[str, float]:
    """The devices that may not work all the time, and how much of it."""
    return {device: factor for device, factor in snapshot.usage.duty.items() if factor < 1} if snapshot.usage else {}
