"""What this node has earned: confirmed by the hub, and pending."""

from __future__ import annotations

from distensor_tui import format as fmt
from distensor_tui.income import Income, Ledger
from distensor_tui.model import Earnings, HubState
from distensor_tui.scene import Look, View
from distensor_tui.text import Line, Span, Tone, line
from distensor_tui.views import faults
from distensor_tui.views.draw import Column, Panel, labelled, paragraph, sparkline, table

LABEL = 11


def panel(view: View, size: int, look: Look) -> Panel:
    earnings = view.snapshot.earnings
    if earnings is None:
        reason = view.snapshot.unavailable.get("earnings")
        text = f"Not available: {reason}" if reason else "The hub has not said yet."
        return Panel("Earnings", "4", paragraph(text, size, Tone.DIM))
    income = view.snapshot.account
    if look.narrow:
        rows = _short(earnings)
    else:
        rows = _long(earnings, size) if income is None else _account(earnings, income, size, view, look)
    rows = [*rows, *_hint(view, earnings, size), *troubles(view, size, look)]
    return Panel("Earnings", "4", rows, _confirmed_at(view, earnings, look))


def troubles(view: View, size: int, look: Look) -> list[Line]:
    """What keeps the books from being kept or compared; without a job, the hub's absence stands where jobs do."""
    snapshot = view.snapshot
    found = [*snapshot.broken("disk"), *faults.failed(snapshot, "income")]
    found += snapshot.broken("hub") if snapshot.live_jobs else ()
    return faults.rows(found, size, look)


def _confirmed_at(view: View, earnings: Earnings, look: Look) -> Line:
    """When the hub last confirmed; a warning when it cannot any more."""
    hub = view.snapshot.hub
    when = fmt.hour(earnings.confirmed_at, look.zone)
    if hub is not None and hub.state is not HubState.CONNECTED:
        since = when if earnings.confirmed_at is not None else fmt.hour(hub.since, look.zone)
        return line((f"{look.glyphs.warn} unconfirmed since {since}", Tone.WARN))
    if earnings.confirmed_at is None:
        return line(("not confirmed yet", Tone.DIM))
    return line((f"{look.glyphs.ok} hub, {when}", Tone.DIM))


def _short(earnings: Earnings) -> list[Line]:
    return [
        line(
            ("today ", Tone.DIM),
            (f"{fmt.short_credits(earnings.today_micro)} credits", Tone.GOOD),
            ("   confirmed ", Tone.DIM),
            fmt.short_credits(earnings.confirmed_micro),
            ("   pending ", Tone.DIM),
            *pending(earnings),
        )
    ]


def pending(earnings: Earnings) -> Line:
    """'about 0.024 (6 units)'; before the first confirmed unit nobody knows what one is worth."""
    units, micro = fmt.plural(earnings.pending_units, "unit"), earnings.pending_micro
    if not earnings.pending_units or micro is None:
        return line(units)
    return line("about ", fmt.short_credits(micro), (f" ({units})", Tone.DIM))


def _pending_row(earnings: Earnings, unit: Line) -> Line:
    """The same below the other amounts."""
    micro = earnings.pending_micro
    units = fmt.plural(earnings.pending_units, "unit")
    if not earnings.pending_units or micro is None:
        return labelled("pending", line(f"{'-':>12}", (f"  {units}", Tone.DIM)), LABEL)
    return labelled(
        "pending", (Span(f"{'~' + fmt.short_credits(micro):>12}"), *unit, Span(f"  {units}", Tone.DIM)), LABEL
    )


def _long(earnings: Earnings, size: int) -> list[Line]:
    unit = line((" credits", Tone.DIM))
    rows = [
        labelled("today", (Span(f"{fmt.short_credits(earnings.today_micro):>12}", Tone.GOOD), *unit), LABEL),
        labelled(
            "confirmed",
            (
                Span(f"{fmt.short_credits(earnings.confirmed_micro):>12}", Tone.STRONG),
                *unit,
                Span(f"  {fmt.plural(earnings.confirmed_units, 'unit')}", Tone.DIM),
            ),
            LABEL,
        ),
        _pending_row(earnings, unit),
    ]
    return rows + (paragraph(earnings.price_note, size, Tone.DIM) if earnings.price_note else [])


def _account(earnings: Earnings, income: Income, size: int, view: View, look: Look) -> list[Line]:
    """The same with the last hours, the week's energy and net, and whether the books agree."""
    unit = line((" cr", Tone.DIM))
    hours = f"  {sparkline(income.hours, min(24, size - LABEL - 17), look.glyphs)}" if any(income.hours) else ""
    week = income.week
    energy = f"  {fmt.energy(week.millijoules)}" if week.millijoules is not None else ""
    today, confirmed = fmt.short_credits(earnings.today_micro), fmt.short_credits(earnings.confirmed_micro)
    net = fmt.money(week.net_micro, income.currency)
    return [
        labelled("today", (Span(f"{today:>12}", Tone.GOOD), *unit, Span(hours, Tone.ACCENT)), LABEL),
        labelled("7 d", (Span(f"{fmt.short_credits(week.micro):>12}"), *unit, Span(energy, Tone.DIM)), LABEL),
        *([labelled("net 7 d", line(f"{net:>16}"), LABEL)] if week.net_micro is not None else []),
        labelled(
            "confirmed",
            (
                Span(f"{confirmed:>12}", Tone.STRONG),
                *unit,
                Span(f"  {fmt.plural(earnings.confirmed_units, 'unit')}", Tone.DIM),
            ),
            LABEL,
        ),
        _pending_row(earnings, unit),
        labelled("ledger", _books(income.ledger, view, look), LABEL),
    ]


def _books(ledger: Ledger, view: View, look: Look) -> Line:
    """The comparison with the hub in a few words; screen 4 has the rest."""
    hub = view.snapshot.hub
    if ledger.state == "unconfirmed" or (hub is not None and hub.state is not HubState.CONNECTED):
        return line((f"{look.glyphs.warn} the hub is away", Tone.WARN))
    if ledger.state == "equal":
        return line((f"= hub {look.glyphs.ok} {fmt.hour(ledger.at, look.zone)}", Tone.GOOD))
    if ledger.state == "differs":
        what = f"{fmt.plural(ledger.different, 'unit')} differ" if ledger.different else "the sums differ"
        return line((f"{look.glyphs.warn} {what} from the hub", Tone.WARN))
    return line(("not compared yet", Tone.DIM))


def _hint(view: View, earnings: Earnings, size: int) -> list[Line]:
    if earnings.confirmed_units or earnings.pending_units:
        return []
    return paragraph("Nothing yet: the first verified step brings the first credits.", size, Tone.DIM)


COLUMNS = (Column("job", least=10), Column("state"), Column("epoch", right=True), Column("units claimed", right=True))


def page(view: View, size: int) -> list[Line]:
    """Header and one row per job with the units that this node claimed in it."""
    jobs = view.snapshot.jobs or ()
    rows: list[list[Span | str]] = [[job.name or job.id, job.state, str(job.epoch), f"{job.units:,}"] for job in jobs]
    return table(COLUMNS, rows, size)


EXPLANATION = (
    "A unit is the work of one worker in one step. The hub credits it once, when the worker's claim and the "
    "trainer's receipt agree. Pending units are claimed, but their receipt has not come yet. "
    "Twenty seconds after work they are laid beside the hub's books; until then they count as unconfirmed."
)
