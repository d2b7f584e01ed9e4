"""What this node has earned and used, by day, job or device; `v` opens the single units beside the hub's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distensor_tui import units
from distensor_tui.actions import Action
from distensor_tui.dialogs import Choose, Option
from distensor_tui.income import DIFFERENT, Income
from distensor_tui.model import Snapshot
from distensor_tui.scene import Ask, Place, Scene, Screen, Step
from distensor_tui.screens.page import Page, Row, ScreenSpec, titled
from distensor_tui.text import EMPTY, Line, Tone, line
from distensor_tui.views import earnings, income, jobs
from distensor_tui.views.draw import Panel, paragraph
from distensor_tui.views.header import Notice

BY = "earnings.by"
GROUPINGS = ("day", "job", "device")
LEAST_FOR_NOTES = 20
"""Lines of a screen; on a smaller one the numbers take all of it."""


def page(scene: Scene) -> Page:
    found = scene.view.snapshot.account
    if scene.ui.place.path:
        return _units(scene, scene.ui.place.path[0])
    return _plain(scene) if found is None else _account(scene, found)


def _account(scene: Scene, found: Income) -> Page:
    size = scene.look.width - 6
    by = _by(scene)
    groups = income.groups(found, by)
    head, cells = titled(income.group_table(groups, by, found.currency, size))
    rows = [
        Row(
            cells=row,
            facts=partial(income.group_facts, group, by, found.currency),
            words=group.id,
            key=group.id,
            log=group.name if by == "job" else "",
        )
        for row, group in zip(cells, groups, strict=True)
    ]
    troubles = earnings.troubles(scene.view, size, scene.look)
    about = [*troubles, *income.summary(found, scene.view, size, scene.look), EMPTY, *head]
    notes = [
        *income.payout(found, size),
        *income.no_power(found, size),
        *paragraph(earnings.EXPLANATION, size, Tone.DIM),
    ]
    below = () if scene.look.height < LEAST_FOR_NOTES else (Panel("Notes", "", notes),)
    return Page(f"Earnings by {by}", about, rows, income.empty(size), below)


def _plain(scene: Scene) -> Page:
    """What is known while the account is not: the hub's sums and the units of each job."""
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


def _units(scene: Scene, standing: str) -> Page:
    look = scene.look
    size = look.width - 6
    found = units.units(scene.ui, standing)
    head, cells = titled(income.unit_table(found or (), size, look))
    rows = [
        Row(
            cells=row,
            facts=partial(income.unit_facts, one, look),
            key=f"{one.get('job')} {one.get('rank')} {one.get('step')}",
        )
        for row, one in zip(cells, found or (), strict=True)
    ]
    word = "all units" if standing == units.ALL else income.SHORT.get(standing, standing)
    title = f"Earnings {look.glyphs.right} {word}, the newest {units.MOST}"
    return Page(title, head, rows, _no_units(scene, standing))


def _no_units(scene: Scene, standing: str) -> list[Line]:
    size = scene.look.width - 6
    if found := units.problem(scene.ui, standing):
        return paragraph(f"Not available: {found}", size, Tone.WARN)
    if units.units(scene.ui, standing) is None:
        return [line(("Asking for the units...", Tone.DIM))]
    return paragraph("No unit of this kind. Old units that both sides agree on are kept as sums.", size, Tone.DIM)


def _by(scene: Scene) -> str:
    word = scene.ui.own.get(BY, GROUPINGS[0])
    return word if word in GROUPINGS else GROUPINGS[0]


def _next_grouping(scene: Scene) -> Step:
    word = GROUPINGS[(GROUPINGS.index(_by(scene)) + 1) % len(GROUPINGS)]
    return scene.ui.remembers(BY, word).at(cursor=0), None


def _choose_units(scene: Scene) -> Step:
    found = scene.view.snapshot.income
    options = [Option(key="a", label="all units, the newest first", step=_opener(units.ALL))]
    for key, word in (("u", "unconfirmed"), ("r", "refused"), ("h", "missing_here"), ("t", "missing_there")):
        count = found.ledger.count(word).units if found else 0
        options.append(Option(key=key, label=f"{count:,} {income.SHORT.get(word, word)}", step=_opener(word)))
    text = "Each unit is one worker's work in one step: what this node claimed beside what the hub has in its books."
    return scene.ui.shows(
        Choose(title="Which units?", text=lambda _scene: text, options=tuple(options), refuse="stay here")
    ), None


def _opener(standing: str) -> Callable[[Scene], Step]:
    def step(scene: Scene) -> Step:
        return scene.ui.go(Place(screen=Screen.EARNINGS, path=(standing,))), None

    return step


def _no_account(scene: Scene) -> str:
    return "" if scene.view.snapshot.income is not None else "this node's account is not there yet"


def poll(scene: Scene) -> Ask | None:
    return units.ask(scene.ui.place.path[0]) if scene.ui.place.path else None


def notices(scene: Scene) -> list[Notice]:
    return _differences(scene.view.snapshot)


def _differences(snapshot: Snapshot) -> list[Notice]:
    found = snapshot.income
    if found is None or found.ledger.state != "differs":
        return []
    parts = [f"{found.ledger.count(w).units:,} {income.SHORT[w]}" for w in DIFFERENT if found.ledger.count(w).units]
    return [(Tone.WARN, f"the ledger differs from the hub: {', '.join(parts) or 'the sums'} (4, then v)")]


SPEC = ScreenSpec(
    screen=Screen.EARNINGS,
    about="what was earned and used, by day, job and device, and each unit beside the hub's books",
    page=page,
    actions=(
        Action(
            name="Group earnings by day, job, device",
            keys=("g",),
            about="by day, job or device",
            do=_next_grouping,
            footer="group",
        ),
        Action(
            name="Units beside the hub's",
            keys=("v",),
            about="single units: here and at the hub",
            do=_choose_units,
            unless=_no_account,
            footer="units",
        ),
    ),
    poll=poll,
    notices=notices,
)
