"""What this node has earned, job by job."""

from __future__ import annotations

from functools import partial

from distensor_tui.scene import Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec, titled
from distensor_tui.text import EMPTY, Tone
from distensor_tui.views import earnings, jobs
from distensor_tui.views.draw import Panel, paragraph


def page(scene: Scene) -> Page:
    view = scene.view
    size = scene.look.width - 6
    head, cells = titled(earnings.page(view, size))
    about = [*earnings.panel(view, size, scene.look).rows, EMPTY, *paragraph(earnings.EXPLANATION, size, Tone.DIM)]
    rows = [
        Row(cells=row, facts=partial(jobs.detail, job, view), words=job.id, log=job.name or job.id)
        for row, job in zip(cells, view.snapshot.jobs or (), strict=True)
    ]
    nothing = paragraph("No job yet, so no units.", size, Tone.DIM)
    return Page("Units per job", head, rows, nothing, (Panel("Books", "", about),))


SPEC = ScreenSpec(screen=Screen.EARNINGS, about="what was earned, what is pending, and the books", page=page)
