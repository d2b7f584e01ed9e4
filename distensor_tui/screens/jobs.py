"""Jobs with this node's workers in them."""

from __future__ import annotations

from functools import partial

from distensor_tui.scene import Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec, titled
from distensor_tui.views import jobs
from distensor_tui.views.draw import Panel


def page(scene: Scene) -> Page:
    view, look = scene.view, scene.look
    size = look.width - 6
    head, cells = titled(jobs.page(view, size))
    rows = [
        Row(cells=row, facts=partial(jobs.detail, job, view), words=job.id, log=job.name or job.id)
        for row, job in zip(cells, view.snapshot.jobs or (), strict=True)
    ]
    below = Panel("Workers on this node", "", jobs.workers_page(view, look.width - 4, look))
    return Page("Jobs", head, rows, jobs.empty(view, size), (below,))


SPEC = ScreenSpec(screen=Screen.JOBS, about="jobs, the workers of each, its stages and links", page=page)
