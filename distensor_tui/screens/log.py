"""What happened, newest first, so that the cursor starts at what just happened."""

from __future__ import annotations

from functools import partial

from distensor_tui.scene import Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec, selected_panel
from distensor_tui.text import Tone, line
from distensor_tui.views import events


def page(scene: Scene) -> Page:
    look = scene.look
    found = (scene.view.snapshot.events or ())[::-1]
    rows = [Row(cells=events.row(e, look), facts=partial(events.detail, e, look), words=str(e.severity)) for e in found]
    nothing = [line(("Nothing has happened yet.", Tone.DIM))]
    head = [line(("newest first", Tone.DIM))]
    return Page("Log", head, rows, nothing, selected_panel(rows, scene, look.width - 6))


SPEC = ScreenSpec(screen=Screen.LOG, about="what happened on this node", page=page)
