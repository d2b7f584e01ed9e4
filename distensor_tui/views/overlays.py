"""Boxes over the screen: help, confirmations, the gates, the details of a row, no supervisor."""

from __future__ import annotations

from distensor_tui import format as fmt
from distensor_tui.absence import Absence
from distensor_tui.scene import Link, Look, Overlay, Ui, View
from distensor_tui.text import EMPTY, Line, Span, Tone, fill, line
from distensor_tui.views import gates, pages
from distensor_tui.views.draw import Panel, box, paragraph

HELP = (
    ("1-7", "screens: Home Jobs Topology Earnings Limits Devices Log"),
    ("Up Down", "move in a table; PgUp PgDn Home End too, and j k"),
    ("Enter", "details of the selected row; on Home: the jobs"),
    ("Esc", "back: close the box, drop the filter, go Home"),
    ("/", "filter the log"),
    ("p", "pause: asks for how long"),
    ("r", "resume after a pause or drain"),
    ("d", "drain: finish the running step, take no more work"),
    ("w", "why this node works or does not: all gates"),
    ("y", "copy the selected row or the details"),
    ("?", "this help"),
    ("q", "quit this view; the supervisor goes on working"),
)


def overlay(view: View, look: Look, ui: Ui) -> list[Line]:
    """The lines of the open box, none when there is none."""
    if ui.overlay is Overlay.NONE:
        return []
    size = min(look.width - 4, 84)
    title, rows = _CONTENT[ui.overlay](view, look, ui, size - 6)
    padded = [EMPTY, *((Span(" "), *row) for row in rows), EMPTY]
    height = min(len(padded) + 2, look.height - 2)
    return box(Panel(title, "", padded), size, height, look.glyphs)


def _help(view: View, look: Look, ui: Ui, size: int) -> tuple[str, list[Line]]:
    return "Keys", [line((fill(key, 9), Tone.KEY), text) for key, text in HELP]


def _affected(view: View) -> str:
    workers = view.snapshot.workers or ()
    names = sorted({worker.job_name or worker.job for worker in workers})
    if not workers:
        return "No worker runs now."
    verb = "ends" if len(workers) == 1 else "end"
    return f"{fmt.plural(len(workers), 'worker')} of {', '.join(names)} {verb} here."


def _pause(view: View, look: Look, ui: Ui, size: int) -> tuple[str, list[Line]]:
    text = (
        f"Pausing stops this node's work and its earnings. {_affected(view)} "
        "The running step is finished first; the job then lacks a rank. Credits earned so far stay yours."
        if view.snapshot.workers
        else "Pausing stops this node's work and its earnings. No worker runs now, so no job is hurt."
    )
    return "Pause this node?", [
        *paragraph(text, size),
        EMPTY,
        line(("1    ", Tone.KEY), f"for one hour, until {fmt.hour(look.now + 3600, look.zone)}"),
        line(("2    ", Tone.KEY), "until you resume (r)"),
        line(("Esc  ", Tone.KEY), "do not pause"),
    ]


def _drain(view: View, look: Look, ui: Ui, size: int) -> tuple[str, list[Line]]:
    text = (
        f"Draining takes no new work and lets running work finish its step. {_affected(view)} "
        "Afterwards this node earns nothing until you resume (r)."
    )
    return "Drain this node?", [
        *paragraph(text, size),
        EMPTY,
        line(("y    ", Tone.KEY), "drain"),
        line(("Esc  ", Tone.KEY), "do not drain"),
    ]


def _why(view: View, look: Look, ui: Ui, size: int) -> tuple[str, list[Line]]:
    node = view.snapshot.node
    if node is None:
        return "Why", [line(("The supervisor has not said anything yet.", Tone.DIM))]
    since = f" since {fmt.hour(node.state_since, look.zone)}" if node.state_since is not None else ""
    head = line((f"{look.glyphs.states[node.state]} {node.state}", Tone.STRONG), (since, Tone.DIM))
    rows = gates.page(view, size, look) if node.why else [line(("The supervisor names no gates.", Tone.DIM))]
    return "Why", [head, EMPTY, *rows, EMPTY, *paragraph("Work comes while all gates are open.", size, Tone.DIM)]


def _detail(view: View, look: Look, ui: Ui, size: int) -> tuple[str, list[Line]]:
    rows = pages.fact_rows(selected(view, look, ui), size)
    return "Details", rows or [line(("Nothing is selected.", Tone.DIM))]


def selected(view: View, look: Look, ui: Ui) -> pages.Facts:
    """The facts of the row under the cursor."""
    if not pages.row_count(view, look, ui):
        return []
    details = pages.page(view, look, ui).details
    return details[min(ui.cursor, len(details) - 1)]() if details else []


_CONTENT = {
    Overlay.HELP: _help,
    Overlay.PAUSE: _pause,
    Overlay.DRAIN: _drain,
    Overlay.WHY: _why,
    Overlay.DETAIL: _detail,
}


def no_data(view: View, look: Look) -> list[Line]:
    """The middle of the screen when no snapshot ever came."""
    size = min(look.width - 4, 92)
    absence = view.feed.absence
    if absence is None:
        rows = _loading(view, size - 6)
        return box(Panel("Connecting", "", rows), size, len(rows) + 2, look.glyphs)
    rows = absent_rows(absence, size - 6, look)
    if view.feed.retry_at is not None and view.feed.link is not Link.LIVE:
        rows = [*rows, line(("Trying again by itself; this view opens as soon as it answers.", Tone.DIM)), EMPTY]
    padded = [(Span(" "), *row) for row in rows]
    return box(Panel(absence.title, "", padded), size, min(len(padded) + 2, look.height - 3), look.glyphs)


def _loading(view: View, size: int) -> list[Line]:
    where = view.feed.source or "the supervisor"
    return [EMPTY, *((Span(" "), *row) for row in paragraph(f"Connecting to {where}", size)), EMPTY]


def absent_rows(absence: Absence, size: int, look: Look) -> list[Line]:
    fixes = [line((f"{look.glyphs.right} ", Tone.ACCENT), (fix, Tone.STRONG)) for fix in absence.fix]
    return [EMPTY, *paragraph(absence.detail, size), EMPTY, *fixes, EMPTY]
