"""The loss and the speed of the first running job as charts, where there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Job
from distensor_tui.scene import Look, View
from distensor_tui.text import Line, Tone, line
from distensor_tui.views.draw import Panel, chart, paragraph

ENOUGH = 2


def shown(view: View) -> Job | None:
    """The job whose curves are drawn; None while there is nothing to draw."""
    jobs = view.snapshot.live_jobs
    return jobs[0] if jobs and jobs[0].step is not None else None


def loss(view: View, job: Job, size: int, height: int, look: Look) -> Panel:
    values = view.history.losses(job.id)
    note = line(("now ", Tone.DIM), (fmt.loss(job.loss), Tone.STRONG))
    return Panel("Loss", "", _chart(values, fmt.loss, size, height, look, None), note)


def speed(view: View, job: Job, size: int, height: int, look: Look) -> Panel:
    values = view.history.speeds(job.id)
    note = line(("now ", Tone.DIM), (f"{fmt.amount(job.tokens_per_second)} tok/s", Tone.STRONG))
    return Panel("Speed", "", _chart(values, fmt.amount, size, height, look, 0.0), note)


def _chart(
    values: Sequence[float], text: Callable[[float], str], size: int, height: int, look: Look, floor: float | None
) -> list[Line]:
    if len(values) < ENOUGH:
        return paragraph("The curve begins with the second step that this view sees.", size, Tone.DIM)
    least = min(values) if floor is None else floor
    return chart(values, (text(max(values)), text(least)), size, height, look.glyphs, floor)
