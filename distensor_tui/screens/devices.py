"""The machine's devices; Enter opens one with all its readings, m measures how fast it is."""

from __future__ import annotations

from functools import partial

from distensor_tui.actions import Action
from distensor_tui.devicefacts import facts
from distensor_tui.model import Device
from distensor_tui.scene import Ask, Scene, Screen, Step
from distensor_tui.screens.page import Page, Row, ScreenSpec, selected, selected_panel, titled
from distensor_tui.text import EMPTY, Line, Span, Tone, fill, line
from distensor_tui.views import devices, faults
from distensor_tui.views.device import gauges
from distensor_tui.views.draw import paragraph

MEASURE_TAKES = "about 15 s"
FACT_NAME = 14


def page(scene: Scene) -> Page:
    return _one(scene, scene.ui.place.path[0]) if scene.ui.place.path else _all(scene)


def _all(scene: Scene) -> Page:
    size = scene.look.width - 6
    head, cells = titled(devices.page(scene.view, size, scene.look))
    rows = [
        Row(
            cells=row,
            facts=partial(_facts, scene, device),
            words=device.id,
            key=device.id,
            log=device.id,
            opens=(device.id,),
        )
        for row, device in zip(cells, scene.view.snapshot.devices or (), strict=True)
    ]
    nothing = devices.panel(scene.view, size, scene.look).rows
    return Page("Devices", head, rows, nothing, selected_panel(rows, scene, size))


def _one(scene: Scene, device_id: str) -> Page:
    look = scene.look
    title = f"Devices {look.glyphs.right} {devices.short_id(device_id)}"
    device = _find(scene, device_id)
    if device is None:
        return Page(title, [], [], [line((f"The device {device_id} is gone. Esc goes back.", Tone.DIM))])
    size = look.width - 6
    rows = [
        Row(cells=cells, facts=partial(_facts, scene, device), log=device.id)
        for name, value in _facts(scene, device)
        for cells in _fact(name, value, size)
    ]
    return Page(title, [*gauges(device, size, look), EMPTY], rows, [])


def _facts(scene: Scene, device: Device) -> list[tuple[str, str]]:
    """What is broken first, then all that is known."""
    broken = scene.view.snapshot.broken("device", device.id)
    return [*faults.facts(broken, scene.look), *facts(device, scene.look.now)]


def _fact(name: str, value: str, size: int) -> list[Line]:
    """A long value on several rows."""
    tone = Tone.DIM if value.startswith("not available") else Tone.TEXT
    first, *others = paragraph(value, size - FACT_NAME, tone)
    return [
        (Span(fill(name, FACT_NAME), Tone.DIM), *first),
        *((Span(" " * FACT_NAME), *other) for other in others),
    ]


def _find(scene: Scene, device_id: str) -> Device | None:
    return next((device for device in scene.view.snapshot.devices or () if device.id == device_id), None)


def _here(scene: Scene) -> Device | None:
    """The device that is open or under the cursor."""
    if scene.ui.place.path:
        return _find(scene, scene.ui.place.path[0])
    row = selected(SPEC, scene)
    return _find(scene, row.key) if row else None


def _why_not(scene: Scene) -> str:
    device = _here(scene)
    if device is None:
        return "There is no device here to measure."
    if not device.usable:
        return f"{device.id} is not used, so it cannot be measured."
    busy = any(worker.state != "exited" for worker in scene.view.snapshot.workers or ())
    return "A worker runs; measure when no job runs." if busy else ""


def _measure(scene: Scene) -> Step:
    device = _here(scene)
    assert device is not None, "checked before"
    done = f"Measuring {devices.short_id(device.id)}: {MEASURE_TAKES}; the rates appear with the device."
    return scene.ui, Ask(method="benchmark", done=done, params={"device": device.id})


MEASURE = Action(
    name="Measure how fast this device is",
    keys=("m",),
    about="multiply matrices, copy memory, write the disk for some seconds",
    footer="measure",
    do=_measure,
    unless=_why_not,
)
SPEC = ScreenSpec(
    screen=Screen.DEVICES,
    about="every device, all its readings, how fast it is, and why one is not used",
    page=page,
    actions=(MEASURE,),
)
