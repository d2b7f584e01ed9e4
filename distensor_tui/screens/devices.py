"""The machine's devices."""

from __future__ import annotations

from functools import partial

from distensor_tui.scene import Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec, selected_panel, titled
from distensor_tui.views import devices


def page(scene: Scene) -> Page:
    size = scene.look.width - 6
    head, cells = titled(devices.page(scene.view, size))
    rows = [
        Row(cells=row, facts=partial(devices.detail, device), log=device.id)
        for row, device in zip(cells, scene.view.snapshot.devices or (), strict=True)
    ]
    nothing = devices.panel(scene.view, size, scene.look).rows
    return Page("Devices", head, rows, nothing, selected_panel(rows, scene, size))


SPEC = ScreenSpec(screen=Screen.DEVICES, about="every device, its load, and why one is not used", page=page)
