"""The gates of this node: what lets work through and what holds it back."""

from __future__ import annotations

from functools import partial

from distensor_tui.scene import Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec, titled
from distensor_tui.text import Tone
from distensor_tui.views import gates
from distensor_tui.views.draw import Panel, paragraph


def page(scene: Scene) -> Page:
    size = scene.look.width - 6
    node = scene.view.snapshot.node
    head, cells = titled(gates.page(scene.view, size, scene.look))
    rows = [
        Row(cells=row, facts=partial(gates.detail, gate, scene.look))
        for row, gate in zip(cells, node.why if node else (), strict=True)
    ]
    about = paragraph(gates.NOT_YET, size, Tone.DIM)
    nothing = paragraph("The supervisor names no gates.", size, Tone.DIM)
    return Page("Gates", head, rows, nothing, (Panel("Limits", "", about),))


SPEC = ScreenSpec(screen=Screen.LIMITS, about="what lets work through and what holds it back", page=page)
