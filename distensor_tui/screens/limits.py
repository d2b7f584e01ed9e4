"""When and how hard this machine works: the owner's limits, and the gates that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distensor_tui import format as fmt
from distensor_tui.actions import Action
from distensor_tui.limits import editor, for_device, limited_devices, reset
from distensor_tui.model import Gate, Setting
from distensor_tui.scene import Scene, Screen, Step
from distensor_tui.screens.page import Facts, Page, Row, ScreenSpec, selected, selected_panel, titled
from distensor_tui.settings import source, with_unit
from distensor_tui.text import Line, Span, Tone, line
from distensor_tui.views import faults, gates
from distensor_tui.views.draw import Column, paragraph, table
from distensor_tui.views.limits import rates

GATE_OF = {
    "schedule": "schedule",
    "only_when_idle": "idle",
    "run_on_battery": "battery",
    "battery_min_percent": "battery",
    "run_on_metered": "metered",
    "yield_gpu": "foreign_gpu",
    "temperature_max_c": "temperature",
    "power_max_w": "power",
    "vram_reserve_gib": "vram",
    "ram_reserve_gib": "ram",
    "disk_reserve_gib": "disk",
    "bytes_day_gb": "bytes_day",
    "bytes_month_gb": "bytes_month",
}
"""The gate that a limit is asked by, whose reading stands beside it."""
RATES = ("upload_max_mb_s", "download_max_mb_s")
"""Limits without a gate: work goes on, no faster than they say."""
COLUMNS = (Column("limit", least=12), Column("is", least=6), Column("from", least=4), Column("reads now", least=10))
CLOSED_SHOWN = 3


def page(scene: Scene) -> Page:
    size = scene.look.width - 6
    limits = scene.view.snapshot.limits
    if limits is None:
        broken = faults.failed(scene.view.snapshot, "limits")
        nothing = faults.rows(broken, size, scene.look) or paragraph(
            "This supervisor names no limits; w shows its gates.", size, Tone.DIM
        )
        return Page("Limits", _gates(scene), [], nothing)
    ordered = _by_key(limits.rows)
    head, cells = titled(table(COLUMNS, [_cells(scene, row) for row in ordered], size))
    rows = [
        Row(cells=row, facts=partial(_facts, setting, limits.file), words=setting.help, key=_key(setting))
        for row, setting in zip(cells, ordered, strict=True)
    ]
    nothing = paragraph("The supervisor names no limits.", size, Tone.DIM)
    return Page("Limits", [*_gates(scene), *head], rows, nothing, selected_panel(rows, scene, size))


def _by_key(rows: Sequence[Setting]) -> list[Setting]:
    """What holds for one device stands below what holds for all."""
    keys = list(dict.fromkeys(row.key for row in rows))
    return sorted(rows, key=lambda row: (keys.index(row.key), row.device is not None))


def _gates(scene: Scene) -> list[Line]:
    """Is work let through, and what closes or opens next."""
    node = scene.view.snapshot.node
    if node is None or not node.why:
        return []
    closed = [gate for gate in node.why if not gate.open]
    shown = [_closed(gate, scene) for gate in closed[:CLOSED_SHOWN]]
    more = f", {len(closed) - CLOSED_SHOWN} more" if len(closed) > CLOSED_SHOWN else ""
    word = (f"{len(closed)} closed{more}", Tone.WARN) if closed else ("work is let through", Tone.GOOD)
    return [line((f"{fmt.plural(len(node.why), 'gate')}: ", Tone.DIM), word, ("   w shows all", Tone.DIM)), *shown]


def _closed(gate: Gate, scene: Scene) -> Line:
    when = gates.next_change(gate, scene.look)
    return line(
        (scene.look.glyphs.no, Tone.WARN),
        (f" {gates.label(gate)}: ", Tone.STRONG),
        (gate.reading, Tone.WARN),
        (f"  {when}" if when else "", Tone.ACCENT),
    )


def _cells(scene: Scene, setting: Setting) -> list[Span | str]:
    name = f"{setting.key} [{setting.device}]" if setting.device else setting.key
    changed = source(setting) != "default"
    return [
        Span(name, Tone.STRONG if changed else Tone.TEXT),
        Span(with_unit(setting), Tone.ACCENT if changed else Tone.TEXT),
        Span(source(setting), Tone.DIM),
        Span(_reading(scene, setting), Tone.DIM),
    ]


def _reading(scene: Scene, setting: Setting) -> str:
    if setting.key in RATES:
        return fmt.rate(rates(scene.view.snapshot)[RATES.index(setting.key)])
    node = scene.view.snapshot.node
    wanted = GATE_OF.get(setting.key)
    found = [gate for gate in (node.why if node else ()) if gate.name == wanted]
    if setting.device is not None:
        found = [gate for gate in found if gate.device == setting.device]
    if len(found) == 1:
        return found[0].reading
    return "; ".join(f"{gate.device}: {gate.reading}" if gate.device else gate.reading for gate in found)


def _key(setting: Setting) -> str:
    return f"{setting.key}@{setting.device or ''}"


def _facts(setting: Setting, file: str) -> Facts:
    return [
        ("limit", setting.key),
        *([("device", setting.device)] if setting.device else []),
        ("what it does", setting.help),
        ("is", with_unit(setting)),
        ("may be", setting.expected),
        ("default", setting.default or "-"),
        ("comes from", setting.source),
        ("changes go to", file),
        (
            "by command",
            f"distensor limits set {setting.key} VALUE{f' --device {setting.device}' if setting.device else ''}",
        ),
    ]


def _here(scene: Scene) -> Setting | None:
    row, limits = selected(SPEC, scene), scene.view.snapshot.limits
    return next((found for found in limits.rows if _key(found) == row.key), None) if row and limits else None


def _change(scene: Scene) -> Step:
    setting = _here(scene)
    assert setting is not None, "checked before"
    return scene.ui.shows(editor(setting)), None


def _change_for_device(scene: Scene) -> Step:
    setting = _here(scene)
    assert setting is not None, "checked before"
    return scene.ui.shows(for_device(setting, scene.view.snapshot)), None


def _not_by_device(scene: Scene) -> str:
    setting = _here(scene)
    if setting is None:
        return _no_limit(scene)
    if not setting.per_device:
        return f"{setting.key} holds for the whole machine."
    return "" if limited_devices(setting, scene.view.snapshot) else "There is no device that it could be for."


def _reset(scene: Scene) -> Step:
    setting = _here(scene)
    assert setting is not None, "checked before"
    return reset(setting, scene)


def _no_limit(scene: Scene) -> str:
    return "" if _here(scene) else "There is no limit here to change."


def _not_yours(scene: Scene) -> str:
    setting = _here(scene)
    if setting is None:
        return _no_limit(scene)
    return "" if source(setting) == "you" else f"{setting.key} is not one that you changed here."


SPEC = ScreenSpec(
    screen=Screen.LIMITS,
    about="when and how hard this machine works, and what the gates read now",
    page=page,
    actions=(
        Action(
            name="Change this limit",
            keys=("e",),
            about="type a new value; what comes of it is said before",
            footer="change",
            do=_change,
            unless=_no_limit,
        ),
        Action(
            name="Change this limit for one device",
            keys=("o",),
            about="another value for one device; the others keep theirs",
            footer="device",
            do=_change_for_device,
            unless=_not_by_device,
        ),
        Action(
            name="Take this limit back to its default",
            keys=("x",),
            about="forget your change (u brings it back)",
            footer="default",
            do=_reset,
            unless=_not_yours,
        ),
    ),
)
