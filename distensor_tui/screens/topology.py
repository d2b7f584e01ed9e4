"""The grids of all running jobs to move through; below, what belongs to the job under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from distensor_tui.model import Job
from distensor_tui.scene import Look, Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec
from distensor_tui.text import Line, Tone, line
from distensor_tui.views import jobs, topology
from distensor_tui.views.draw import Panel


def page(scene: Scene) -> Page:
    view, look = scene.view, scene.look
    running = view.snapshot.live_jobs
    size = look.width - 6
    if not running:
        return Page("Topology", [], [], topology.panel(view, size, look).rows)
    cells, owners = _grids(running, size, look)
    job = owners[min(scene.ui.cursor, len(owners) - 1)]
    links = topology.split_rows(view, job, size, look) + topology.link_rows(job, size, look)
    below = (Panel("Step and links of this node", "", links), Panel("Ranks", "", topology.members_page(job, look)))
    rows = [
        Row(cells=row, facts=partial(jobs.detail, owner, view), log=owner.name or owner.id)
        for row, owner in zip(cells, owners, strict=True)
    ]
    return Page("Topology", [], rows, [], below)


def _grids(running: Sequence[Job], size: int, look: Look) -> tuple[list[Line], list[Job]]:
    """The lines of all grids, and the job that each line belongs to."""
    rows: list[Line] = []
    owners: list[Job] = []
    for job in running:
        title = line((job.name or job.id, Tone.STRONG), f"  {jobs.parallel(job)}  epoch {job.epoch}")
        own = [title, *(topology.grid(job, size, look) if job.members else [])]
        rows += own
        owners += [job] * len(own)
    return rows, owners


SPEC = ScreenSpec(screen=Screen.TOPOLOGY, about="which machine holds which part of a job, and the links", page=page)
