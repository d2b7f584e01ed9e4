"""The mesh of a job as a grid: a row per replica, a column per stage, this node's ranks in brackets."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Job, Member, PeerLink, Worker
from distensor_tui.scene import Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, cells, fill, line
from distensor_tui.views import links
from distensor_tui.views.draw import Column, Panel, bar, paragraph, shares, table
from distensor_tui.views.jobs import parallel

ROW_LABEL = 12
LEAST_CELL = 4
LEAST_NAME = 3
"""A name that is cut shorter says nothing."""
MOST_LINKS = 20
FEW_ROWS = 2
"""So many rows are seen on every screen."""


def panel(view: View, size: int, look: Look) -> Panel:
    """The grid, the split of a step and the links of the first running job."""
    job = shown_job(view)
    if job is None:
        text = "No running job, so no topology. It appears with the first job."
        return Panel("Topology", "3", paragraph(text, size, Tone.DIM))
    note = line((job.name or job.id, Tone.STRONG), (f"  {parallel(job)}", Tone.DIM))
    if not job.members:
        return Panel("Topology", "3", paragraph("The hub is placing the ranks...", size, Tone.DIM), note)
    rows = grid(job, size, look)
    gap = [] if look.narrow else [EMPTY]
    return Panel(
        "Topology", "3", [*rows, *gap, *split_rows(view, job, size, look), *links.link_rows(job, size, look)], note
    )


def shown_job(view: View, cursor: int = 0) -> Job | None:
    """The job under the cursor; without one, the first that runs."""
    jobs = view.snapshot.live_jobs
    return jobs[min(cursor, len(jobs) - 1)] if jobs else None


RowKey = tuple[int, int, int]
"""dp, tp and cp of a row of the grid."""


def grid(job: Job, size: int, look: Look) -> list[Line]:
    """Stage header and one line per (dp, tp, cp), in the order of `grid_rows`."""
    stages = sorted({member.pp for member in job.members})
    at = {_place(member): member for member in job.members}
    first, rest = _cell_widths(job, stages, size)
    shown = _window(stages, _fitting(len(stages), first, rest, size), {m.pp for m in job.members if m.mine})
    rows = [(row, [at.get((*row, pp)) for pp in shown]) for row in grid_rows(job)]
    header = _header(shown, len(stages), first, rest)
    wires = links.by_pair(job)
    return [header, *(_grid_row(job, wires, *pair, (first, rest), look) for pair in rows)]


def grid_rows(job: Job) -> list[RowKey]:
    """All rows by dp, tp, cp; where they are many, those with this node's ranks come first, so that they are seen."""
    rows = sorted({(m.dp, m.tp, m.cp) for m in job.members})
    mine = {(m.dp, m.tp, m.cp) for m in job.members if m.mine}
    return sorted(rows, key=lambda row: (row not in mine, row)) if len(rows) > FEW_ROWS else rows


def _window(stages: Sequence[int], count: int, mine: set[int]) -> Sequence[int]:
    """As many neighbouring stages as fit, with this node's first one among them, and more if they fit too."""
    if count >= len(stages) or not mine:
        return stages[:count]
    first, last = stages.index(min(mine)), stages.index(max(mine))
    start = first if last - first >= count else first - (count - 1 - (last - first)) // 2
    start = max(0, min(start, len(stages) - count))
    return stages[start : start + count]


def _place(member: Member) -> tuple[int, int, int, int]:
    return member.dp, member.tp, member.cp, member.pp


def _cell_widths(job: Job, stages: Sequence[int], size: int) -> tuple[int, int]:
    """Width of a rank's label and of the link in front of every stage but the first."""
    label = max(cells(_label(member)) for member in job.members)
    count = len(stages)
    room = size - ROW_LABEL
    link = min(24, max(4, (room - label * count) // max(1, count - 1)))
    if count > 1 and room < label * count + link * (count - 1):
        number = len(f"[{max(member.rank for member in job.members)}]")
        label = max(LEAST_CELL, number, (room - link * (count - 1)) // count)
    return label, link


def _fitting(count: int, label: int, link: int, size: int) -> int:
    return max(1, min(count, (size - ROW_LABEL + link) // (label + link)))


def _label(member: Member) -> str:
    """[atlas-3:0] is rank 0 on this node, atlas-3; without brackets it is another's."""
    text = f"{member.node}:{member.rank}"
    return f"[{text}]" if member.mine else f" {text} "


def _header(stages: Sequence[int], known: int, label: int, link: int) -> Line:
    """The stages above their columns; in front how many there are, where not all fit."""
    word = " stage " if label >= len(f" stage {max(stages)}") else " s"
    names = (" " * link).join(fill(f"{word}{stage}", label) for stage in stages)
    part = f"{len(stages)} of {known}" if len(stages) < known else ""
    return line((fill(part, ROW_LABEL), Tone.WARN), (names, Tone.DIM))


def _row_name(job: Job, row: tuple[int, int, int]) -> str:
    dp, tp, cp = row
    name = f"dp{dp}"
    name += f" tp{tp}" if job.parallel.tp > 1 else ""
    return name + (f" cp{cp}" if job.parallel.cp > 1 else "")


def _grid_row(
    job: Job, wires: links.Pairs, row: RowKey, members: Sequence[Member | None], widths: tuple[int, int], look: Look
) -> Line:
    label, link = widths
    spans = [Span(fill(_row_name(job, row), ROW_LABEL), Tone.DIM)]
    for i, member in enumerate(members):
        if i:
            spans += _wire(wires, members[i - 1], member, link, look)
        text = "?" if member is None else _short_label(member, label)
        spans.append(Span(fill(text, label), Tone.MINE if member is not None and member.mine else Tone.TEXT))
    return tuple(spans)


def _short_label(member: Member, size: int) -> str:
    """When the node's name does not fit, the rank alone must still be right."""
    text = _label(member)
    if cells(text) <= size:
        return text
    rank = f":{member.rank}]" if member.mine else f":{member.rank}"
    start = "[" if member.mine else " "
    name_room = size - len(rank) - 1
    if name_room < LEAST_NAME:
        return f"[{member.rank}]" if member.mine else f" {member.rank}"
    return f"{start}{fill(member.node, name_room)}{rank}"


def _wire(wires: links.Pairs, left: Member | None, right: Member | None, size: int, look: Look) -> list[Span]:
    """The connection between neighbours; with round trip and rate where this node has measured them."""
    horizontal = look.glyphs.horizontal
    found = None if left is None or right is None else wires.get(frozenset((left.rank, right.rank)))
    text = "" if found is None else _wire_text(found, size - 2)
    if not text:
        return [Span(horizontal * size, Tone.BORDER)]
    start = (size - cells(text)) // 2
    return [
        Span(horizontal * start, Tone.BORDER),
        Span(text, Tone.ACCENT),
        Span(horizontal * (size - start - cells(text)), Tone.BORDER),
    ]


def _wire_text(found: PeerLink, size: int) -> str:
    """The most that fits: round trip and rate, round trip, rate."""
    rates = [rate for rate in (found.sent_rate, found.received_rate) if rate is not None]
    rate = fmt.rate(sum(rates)) if rates else ""
    trip = "" if found.rtt_ms is None else fmt.milliseconds(found.rtt_ms)
    for text in (
        f" {trip}  {rate} " if trip and rate else "",
        f" {trip} " if trip else "",
        f" {rate} " if rate else "",
    ):
        if text and cells(text) <= size:
            return text
    return ""


def split_rows(view: View, job: Job, size: int, look: Look) -> list[Line]:
    """Where the time of this node's steps goes, summed over its workers."""
    workers = [w for w in view.snapshot.workers or () if w.job == job.id]
    compute, sync, wait = (_mean(workers, part) for part in ("compute_s", "sync_s", "wait_s"))
    total = compute + sync + wait
    if total <= 0:
        return []
    parts = [
        (f"compute {fmt.seconds(compute)} ", compute, Tone.COMPUTE),
        (f"  sync {fmt.seconds(sync)} ", sync, Tone.SYNC),
        (f"  wait {fmt.seconds(wait)} ", wait, Tone.WAIT),
    ]
    room = size - ROW_LABEL - sum(cells(text) for text, _, _ in parts)
    gauges = shares([value for _, value, _ in parts], max(3, room))
    spans: list[Span] = [Span(fill("step time", ROW_LABEL), Tone.DIM)]
    for (text, _, tone), gauge in zip(parts, gauges, strict=True):
        spans += [Span(text, Tone.TEXT), *bar(1.0, gauge, look.glyphs, tone)]
    return [tuple(spans)]


def _mean(workers: Sequence[Worker], part: str) -> float:
    values: list[float] = [getattr(worker, part) for worker in workers]
    return sum(values) / len(values) if values else 0.0


def progress_row(job: Job) -> Line:
    """Step, loss and speed of the job."""
    total = f"/{job.total_steps:,}" if job.total_steps else ""
    step = fmt.NOTHING if job.step is None else f"{job.step:,}{total}"
    return line(
        (fill("step", ROW_LABEL), Tone.DIM),
        (step, Tone.STRONG),
        ("   loss ", Tone.DIM),
        fmt.loss(job.loss),
        ("   ", Tone.DIM),
        f"{fmt.amount(job.tokens_per_second)} tok/s",
    )


RANK_COLUMNS = (
    Column("rank", right=True),
    Column("dp", right=True),
    Column("tp", right=True),
    Column("pp", right=True),
    Column("cp", right=True),
    Column("node", least=8),
    Column("round trip", right=True),
    Column("rate", right=True),
    Column(""),
)


def rank_table(job: Job, members: Sequence[Member], size: int) -> list[Line]:
    """One row per rank with the fastest known way from this node to it."""
    rows: list[list[Span | str]] = []
    to_rank = links.by_peer(job)
    for member in members:
        found = to_rank.get(member.rank, [])
        rates = [r for one in found for r in (one.sent_rate, one.received_rate) if r is not None]
        trips = [one.rtt_ms for one in found if one.rtt_ms is not None]
        tone = Tone.MINE if member.mine else Tone.TEXT
        rows.append(
            [
                Span(str(member.rank), tone),
                *(str(getattr(member, axis)) for axis in ("dp", "tp", "pp", "cp")),
                Span(member.node, tone),
                fmt.milliseconds(min(trips, default=None)),
                fmt.rate(sum(rates)) if rates else fmt.NOTHING,
                Span("this node" if member.mine else "", Tone.MINE),
            ]
        )
    return table(RANK_COLUMNS, rows, size)


def rank_facts(job: Job, member: Member, workers: Sequence[Worker]) -> list[tuple[str, str]]:
    """Everything that is known of a rank: its place, its worker where it is ours, and our links to it."""
    facts = [
        ("rank", f"{member.rank}{' on this node' if member.mine else ''}"),
        ("node", member.node),
        ("place", f"dp {member.dp}, tp {member.tp}, pp {member.pp}, cp {member.cp}"),
    ]
    worker = next((one for one in workers if one.job == job.id and one.rank == member.rank), None)
    if member.mine and worker is not None:
        facts += [
            ("worker", f"{worker.id}, {worker.state}, on {worker.device}"),
            ("compute", fmt.seconds(worker.compute_s)),
            ("sync", fmt.seconds(worker.sync_s)),
            ("wait", fmt.seconds(worker.wait_s)),
        ]
    own = (
        [one for one in job.links if one.rank == member.rank]
        if member.mine
        else links.by_peer(job).get(member.rank, [])
    )
    shown = sorted(own, key=lambda one: -(one.rtt_ms or 0.0))[:MOST_LINKS]
    facts += [(f"rank {one.rank} - {links.peer_text(one.peer)}", links.text(one)) for one in shown]
    if len(own) > len(shown):
        facts.append(("more links", str(len(own) - len(shown))))
    return facts
