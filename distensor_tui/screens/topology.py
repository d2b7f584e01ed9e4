"""The grids of all running jobs to move through; Enter opens the ranks of a row or job, and then one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from distensor_tui.model import Job, Member
from distensor_tui.scene import Scene, Screen
from distensor_tui.screens.page import Page, Row, ScreenSpec, titled
from distensor_tui.text import EMPTY, Line, Tone, line
from distensor_tui.views import jobs, topology
from distensor_tui.views.draw import Panel
from distensor_tui.views.links import link_rows


class _Entry(NamedTuple):
    """A line of the grids: of which job, and what it opens."""

    cells: Line
    job: Job
    opens: tuple[str, ...]


def page(scene: Scene) -> Page:
    path = scene.ui.place.path
    return _ranks(scene, path) if path else _all(scene)


def _all(scene: Scene) -> Page:
    view, look = scene.view, scene.look
    running = view.snapshot.live_jobs
    size = look.width - 6
    if not running:
        return Page("Topology", [], [], topology.panel(view, size, look).rows)
    entries = [entry for job in running for entry in _entries(scene, job, size)]
    job = entries[min(scene.ui.cursor, len(entries) - 1)].job
    below = Panel("Step and links of this node", "", _about(scene, job, size))
    rows = [
        Row(
            cells=entry.cells,
            facts=partial(jobs.detail, entry.job, view),
            key=" ".join(entry.opens),
            log=entry.job.name or entry.job.id,
            opens=entry.opens,
        )
        for entry in entries
    ]
    return Page("Topology", [], rows, [], (below,))


def _about(scene: Scene, job: Job, size: int) -> list[Line]:
    view, look = scene.view, scene.look
    return [topology.progress_row(job), *topology.split_rows(view, job, size, look), *link_rows(job, size, look)]


def _entries(scene: Scene, job: Job, size: int) -> list[_Entry]:
    """The name of a job and the lines of its grid."""
    title = line((job.name or job.id, Tone.STRONG), f"  {jobs.parallel(job)}  epoch {job.epoch}")
    if not job.members:
        return [_Entry((*title, *line(("  the hub is placing the ranks", Tone.DIM))), job, (job.id,))]
    head, *lines = topology.grid(job, size, scene.look)
    rows = [
        _Entry(cells, job, (job.id, " ".join(map(str, key))))
        for cells, key in zip(lines, topology.grid_rows(job), strict=True)
    ]
    return [_Entry(title, job, (job.id,)), _Entry(head, job, (job.id,)), *rows]


def _ranks(scene: Scene, path: Sequence[str]) -> Page:
    """The ranks of a row of the grid, or of the whole job; this node's first."""
    view, look = scene.view, scene.look
    size = look.width - 6
    job = next((found for found in view.snapshot.jobs or () if found.id == path[0]), None)
    if job is None:
        return Page("Topology", [], [], [line((f"The job {path[0]} is gone. Esc goes back.", Tone.DIM))])
    members = _members(job, path[1] if len(path) > 1 else "")
    head, cells = titled(topology.rank_table(job, members, size))
    rows = [
        Row(
            cells=row,
            facts=partial(topology.rank_facts, job, member, view.snapshot.workers or ()),
            words=member.node,
            key=str(member.rank),
        )
        for row, member in zip(cells, members, strict=True)
    ]
    title = f"Topology {look.glyphs.right} {job.name or job.id}"
    about = [*_about(scene, job, size)[:3], EMPTY, *head]
    return Page(title, about, rows, [line(("No rank is placed here.", Tone.DIM))])


def _members(job: Job, row: str) -> list[Member]:
    found = [m for m in job.members if not row or " ".join(map(str, (m.dp, m.tp, m.cp))) == row]
    return sorted(found, key=lambda m: (not m.mine, m.rank))


SPEC = ScreenSpec(
    screen=Screen.TOPOLOGY, about="which machine holds which part of a job, and how good the links are", page=page
)
