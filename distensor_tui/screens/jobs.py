"""Jobs; Enter opens one with its workers, stages and links, Enter again a worker with its log file."""

from __future__ import annotations

from functools import partial

from distensor_tui import logfile
from distensor_tui.dialogs import facts
from distensor_tui.model import Job, Worker
from distensor_tui.scene import Ask, Scene, Screen
from distensor_tui.screens.log import file_empty, file_rows
from distensor_tui.screens.page import Page, Row, ScreenSpec, titled
from distensor_tui.text import EMPTY, Tone, line
from distensor_tui.views import faults, jobs, topology
from distensor_tui.views.draw import Panel
from distensor_tui.views.links import link_rows


def page(scene: Scene) -> Page:
    path = scene.ui.place.path
    if not path:
        return _all(scene)
    job = next((found for found in scene.view.snapshot.jobs or () if found.id == path[0]), None)
    if job is None:
        return _gone(f"The job {path[0]} is gone.")
    return _job(scene, job) if len(path) == 1 else _worker(scene, job, path[1])


def _gone(text: str) -> Page:
    return Page("Jobs", [], [], [line((f"{text} Esc goes back.", Tone.DIM))])


def _all(scene: Scene) -> Page:
    view, look = scene.view, scene.look
    size = look.width - 6
    head, cells = titled(jobs.page(view, size))
    rows = [
        Row(
            cells=row,
            facts=partial(jobs.detail, job, view),
            words=job.id,
            key=f"{job.id} {job.epoch}",
            log=job.name or job.id,
            opens=(job.id,),
        )
        for row, job in zip(cells, view.snapshot.jobs or (), strict=True)
    ]
    below = Panel("Workers on this node", "", jobs.workers_page(view, look.width - 4, look))
    return Page("Jobs", head, rows, jobs.empty(view, size, look), (below,))


def _job(scene: Scene, job: Job) -> Page:
    view, look = scene.view, scene.look
    size = look.width - 6
    mine = [worker for worker in view.snapshot.workers or () if worker.job == job.id]
    head, cells = titled(jobs.worker_table(mine, size, look, names=True))
    rows = [
        Row(
            cells=row,
            facts=partial(_facts, scene, worker),
            key=worker.id,
            file=worker.id,
            opens=(job.id, worker.id),
        )
        for row, worker in zip(cells, mine, strict=True)
    ]
    about = [*jobs.job_rows(job, view, size, look), EMPTY, *head]
    nothing = [line(("None of its workers runs here now.", Tone.DIM))]
    stages = topology.grid(job, size, look) if job.members else [line(("no ranks are placed yet", Tone.DIM))]
    links = [*topology.split_rows(view, job, size, look), *link_rows(job, size, look)]
    below = (Panel("Stages", "3", stages), Panel("Step and links of this node", "", links))
    return Page(f"Jobs {look.glyphs.right} {job.name or job.id}", about, rows, nothing, below)


def _worker(scene: Scene, job: Job, name: str) -> Page:
    look = scene.look
    worker = next((found for found in scene.view.snapshot.workers or () if found.id == name), None)
    title = f"Jobs {look.glyphs.right} {job.name or job.id} {look.glyphs.right} {name}"
    about = (
        facts(_facts(scene, worker), look.width - 6) if worker else [line((f"The worker {name} is gone.", Tone.WARN))]
    )
    head = [*about, EMPTY, line(("the end of its log file", Tone.DIM))]
    return Page(title, head, file_rows(scene, name), file_empty(scene, name), tail=True)


def _facts(scene: Scene, worker: Worker) -> list[tuple[str, str]]:
    broken = scene.view.snapshot.broken("worker", worker.id)
    return [*jobs.worker_detail(worker), *faults.facts(broken, scene.look)]


def poll(scene: Scene) -> Ask | None:
    path = scene.ui.place.path
    return logfile.ask(path[1]) if len(path) == 2 else None


SPEC = ScreenSpec(
    screen=Screen.JOBS, about="jobs, and in each its workers, stages, links and logs", page=page, poll=poll
)
