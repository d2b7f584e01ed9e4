"""The screens 2 to 7: full-size tables of what the data carries, with a cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distensor_tui.model import Job
from distensor_tui.scene import Look, Screen, Ui, View
from distensor_tui.text import EMPTY, Line, Span, Tone, fill, line
from distensor_tui.views import devices, earnings, events, gates, jobs, topology
from distensor_tui.views.draw import Panel, allot, box, paragraph

Facts = list[tuple[str, str]]
FACT_NAME = 14


class Page(NamedTuple):
    """One screen: fixed rows above, rows to move through, panels below."""

    title: str
    head: list[Line]
    rows: list[Line]
    empty: list[Line]
    details: Sequence[Callable[[], Facts]] = ()
    """What Enter shows for each row."""
    below: tuple[Panel, ...] = ()
    from_end: bool = False


def page(view: View, look: Look, ui: Ui) -> Page:
    return _PAGES[ui.screen](view, look, ui)


def row_count(view: View, look: Look, ui: Ui) -> int:
    return 0 if ui.screen is Screen.HOME or not view.has_data else len(page(view, look, ui).rows)


def body(view: View, height: int, look: Look, ui: Ui) -> list[Line]:
    """The page in a frame, then its panels."""
    found = page(view, look, ui)
    rows = _window(found, ui, height, look)
    note = line((f"filter: {ui.filter}", Tone.WARN)) if ui.filter else EMPTY
    main = Panel(found.title, str(int(ui.screen)), rows, note)
    wanted = [(len(p.rows) + 2, min(3, len(p.rows) + 2)) for p in found.below]
    first = len(rows) + 2 if found.below else height
    heights = allot(height, [(first, min(first, max(5, height // 3))), *wanted])
    panels = zip((main, *found.below), heights, strict=True)
    return [row for p, h in panels for row in box(p, look.width, h, look.glyphs)]


def _window(found: Page, ui: Ui, height: int, look: Look) -> list[Line]:
    """The part of the rows around the cursor."""
    if not found.rows:
        return [*found.head, *found.empty]
    room = max(1, height - 2 - len(found.head) - sum(min(6, len(p.rows) + 2) for p in found.below))
    cursor = min(ui.cursor, len(found.rows) - 1)
    start = max(0, min(cursor - room // 2, len(found.rows) - room))
    shown = found.rows[start : start + room]
    marked = [_marked(row, start + i == cursor, look) for i, row in enumerate(shown)]
    return [*((Span("  "), *row) for row in found.head), *marked]


def _marked(row: Line, here: bool, look: Look) -> Line:
    if not here:
        return (Span("  "), *row)
    return (Span(f"{look.glyphs.cursor} ", Tone.ACCENT), *toned_plain(row))


def toned_plain(row: Line) -> Line:
    """The row under the cursor: plain spans brighter, coloured ones as they are."""
    return tuple(Span(s.text, Tone.CURSOR) if s.tone in (Tone.TEXT, Tone.DIM, Tone.STRONG) else s for s in row)


def _split(rows: list[Line]) -> tuple[list[Line], list[Line]]:
    return rows[:1], rows[1:]


def _jobs(view: View, look: Look, ui: Ui) -> Page:
    size = look.width - 6
    head, rows = _split(jobs.page(view, size))
    found = view.snapshot.jobs or ()
    below = Panel("Workers on this node", "", jobs.workers_page(view, look.width - 4, look))
    details = [lambda job=job: jobs.detail(job, view) for job in found]
    return Page("Jobs", head if rows else [], rows, jobs.empty(view, size), details, (below,))


def _topology(view: View, look: Look, ui: Ui) -> Page:
    """The grids of all running jobs to move through; below, what belongs to the job under the cursor."""
    running = view.snapshot.live_jobs
    size = look.width - 6
    if not running:
        return Page("Topology", [], [], topology.panel(view, size, look).rows)
    rows, owners = _grids(running, size, look)
    job = owners[min(ui.cursor, len(owners) - 1)]
    links = topology.split_rows(view, job, size, look) + topology.link_rows(job, size, look)
    below = (Panel("Step and links of this node", "", links), Panel("Ranks", "", topology.members_page(job, look)))
    details = [lambda owner=owner: jobs.detail(owner, view) for owner in owners]
    return Page("Topology", [], rows, [], details, below)


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


def _earnings(view: View, look: Look, ui: Ui) -> Page:
    size = look.width - 6
    head, rows = _split(earnings.page(view, size))
    found = view.snapshot.jobs or ()
    about = [*earnings.panel(view, size, look).rows, EMPTY, *paragraph(earnings.EXPLANATION, size, Tone.DIM)]
    nothing = paragraph("No job yet, so no units.", size, Tone.DIM)
    details = [lambda job=job: jobs.detail(job, view) for job in found]
    return Page("Units per job", head if rows else [], rows, nothing, details, (Panel("Books", "", about),))


def _limits(view: View, look: Look, ui: Ui) -> Page:
    size = look.width - 6
    head, rows = _split(gates.page(view, size, look))
    about = paragraph(gates.NOT_YET, size, Tone.DIM)
    nothing = paragraph("The supervisor names no gates.", size, Tone.DIM)
    return Page("Gates", head if rows else [], rows, nothing, (), (Panel("Limits", "", about),))


def _devices(view: View, look: Look, ui: Ui) -> Page:
    size = look.width - 6
    head, rows = _split(devices.page(view, size))
    found = view.snapshot.devices or ()
    details = [lambda device=device: devices.detail(device) for device in found]
    below = _selected([devices.detail(device) for device in found], ui, size)
    return Page("Devices", head if rows else [], rows, devices.panel(view, size, look).rows, details, below)


def _log(view: View, look: Look, ui: Ui) -> Page:
    """Newest first, so that the cursor starts at what just happened."""
    found = events.matching(view.snapshot.events or (), ui.filter)[::-1]
    rows = [events.row(event, look) for event in found]
    details = [lambda event=event: events.detail(event, look) for event in found]
    text = "No event matches the filter." if ui.filter else "Nothing has happened yet."
    below = _selected([events.detail(event, look) for event in found], ui, look.width - 6)
    return Page("Log", [line(("newest first", Tone.DIM))], rows, [line((text, Tone.DIM))], details, below)


def _selected(all_facts: Sequence[Facts], ui: Ui, size: int) -> tuple[Panel, ...]:
    """The row under the cursor in full, for what a table row cuts off."""
    if not all_facts:
        return ()
    return (Panel("Selected", "", fact_rows(all_facts[min(ui.cursor, len(all_facts) - 1)], size)),)


def fact_rows(facts: Facts, size: int) -> list[Line]:
    """Names and values, long values on several lines."""
    rows: list[Line] = []
    for name, value in facts:
        first, *others = paragraph(value, size - FACT_NAME)
        rows += [(Span(fill(name, FACT_NAME), Tone.DIM), *first)]
        rows += [(Span(" " * FACT_NAME), *other) for other in others]
    return rows


_PAGES: dict[Screen, Callable[[View, Look, Ui], Page]] = {
    Screen.JOBS: _jobs,
    Screen.TOPOLOGY: _topology,
    Screen.EARNINGS: _earnings,
    Screen.LIMITS: _limits,
    Screen.DEVICES: _devices,
    Screen.LOG: _log,
}
