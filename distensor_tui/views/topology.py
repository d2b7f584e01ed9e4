"""The mesh of a job as a grid: a row per replica, a column per stage, this node's ranks in brackets."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Job, Member, PeerLink, Worker
from distensor_tui.scene import Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, cells, clip, fill, line, width
from distensor_tui.views.draw import Panel, bar, paragraph, shares
from distensor_tui.views.jobs import parallel

ROW_LABEL = 12
LEAST_CELL = 4
DRIVER = -1


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
    return Panel("Topology", "3", [*rows, *gap, *split_rows(view, job, size, look), *link_rows(job, size, look)], note)


def shown_job(view: View, cursor: int = 0) -> Job | None:
    """The job under the cursor; without one, the first that runs."""
    jobs = view.snapshot.live_jobs
    return jobs[min(cursor, len(jobs) - 1)] if jobs else None


def grid(job: Job, size: int, look: Look) -> list[Line]:
    """Stage header and one line per (dp, tp, cp)."""
    stages = sorted({member.pp for member in job.members})
    at = {_place(member): member for member in job.members}
    rows = sorted({(m.dp, m.tp, m.cp) for m in job.members})
    first, rest = _cell_widths(job, stages, size)
    stages = stages[: _fitting(len(stages), first, rest, size)]
    shown = [(row, [at.get((*row, pp)) for pp in stages]) for row in rows]
    return [_header(stages, first, rest), *(_grid_row(job, *pair, (first, rest), look) for pair in shown)]


def _place(member: Member) -> tuple[int, int, int, int]:
    return member.dp, member.tp, member.cp, member.pp


def _cell_widths(job: Job, stages: Sequence[int], size: int) -> tuple[int, int]:
    """Width of a rank's label and of the link in front of every stage but the first."""
    label = max(cells(_label(member)) for member in job.members)
    count = len(stages)
    room = size - ROW_LABEL
    link = min(24, max(4, (room - label * count) // max(1, count - 1)))
    if count > 1 and room < label * count + link * (count - 1):
        label = max(LEAST_CELL, (room - link * (count - 1)) // count)
    return label, link


def _fitting(count: int, label: int, link: int, size: int) -> int:
    return max(1, min(count, (size - ROW_LABEL + link) // (label + link)))


def _label(member: Member) -> str:
    """[atlas-3:0] is rank 0 on this node, atlas-3; without brackets it is another's."""
    text = f"{member.node}:{member.rank}"
    return f"[{text}]" if member.mine else f" {text} "


def _header(stages: Sequence[int], label: int, link: int) -> Line:
    word = " stage " if label >= len(f" stage {max(stages)}") else " s"
    names = (" " * link).join(fill(f"{word}{stage}", label) for stage in stages)
    return line((" " * ROW_LABEL + names, Tone.DIM))


def _row_name(job: Job, row: tuple[int, int, int]) -> str:
    dp, tp, cp = row
    name = f"dp{dp}"
    name += f" tp{tp}" if job.parallel.tp > 1 else ""
    return name + (f" cp{cp}" if job.parallel.cp > 1 else "")


def _grid_row(
    job: Job, row: tuple[int, int, int], members: Sequence[Member | None], widths: tuple[int, int], look: Look
) -> Line:
    label, link = widths
    spans = [Span(fill(_row_name(job, row), ROW_LABEL), Tone.DIM)]
    for i, member in enumerate(members):
        if i:
            spans += _wire(job, members[i - 1], member, link, look)
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
    if name_room < 1:
        return f"[{member.rank}]" if member.mine else f" {member.rank}"
    return f"{start}{fill(member.node, name_room)}{rank}"


def _wire(job: Job, left: Member | None, right: Member | None, size: int, look: Look) -> list[Span]:
    """The connection between neighbours; with its rate where this node can measure it."""
    horizontal = look.glyphs.horizontal
    traffic = None if left is None or right is None else _traffic(job, left.rank, right.rank)
    if traffic is None or size < 12:
        return [Span(horizontal * size, Tone.BORDER)]
    text = f" {fmt.rate(traffic)} "
    start = (size - cells(text)) // 2
    return [
        Span(horizontal * start, Tone.BORDER),
        Span(text, Tone.ACCENT),
        Span(horizontal * (size - start - cells(text)), Tone.BORDER),
    ]


def _traffic(job: Job, one: int, other: int) -> float | None:
    """Bytes per second in both directions between two ranks, seen from either end."""
    for found in job.links:
        if (found.rank, found.peer) in ((one, other), (other, one)):
            rates = [r for r in (found.sent_rate, found.received_rate) if r is not None]
            return sum(rates) if rates else None
    return None


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


def link_rows(job: Job, size: int, look: Look) -> list[Line]:
    """Every connection of this node's ranks, one between two of them once, the trainer's last."""
    if not job.links:
        return [line((fill("links", ROW_LABEL), Tone.DIM), ("no traffic yet", Tone.DIM))]
    names = {member.rank: member.node for member in job.members}
    mine = {member.rank for member in job.members if member.mine}
    once = [found for found in job.links if not (found.peer in mine and found.peer < found.rank)]
    ordered = sorted(once, key=lambda found: (found.peer == DRIVER, found.rank, found.peer))
    label = max(width(_ends(found, names, look)) for found in ordered)
    return [_link_row(found, i, names, label, look) for i, found in enumerate(ordered)]


def _link_row(found: PeerLink, index: int, names: dict[int, str], label: int, look: Look) -> Line:
    glyphs = look.glyphs
    ends = _ends(found, names, look)
    return (
        Span(fill("" if index else "links", ROW_LABEL), Tone.DIM),
        *ends,
        Span(" " * (label - width(ends) + 2)),
        Span(f"{glyphs.up} {fmt.rate(found.sent_rate):>9}  {glyphs.down} {fmt.rate(found.received_rate):>9}"),
        Span(f"  sum {fmt.memory(found.sent + found.received)}", Tone.DIM),
    )


def _ends(found: PeerLink, names: dict[int, str], look: Look) -> Line:
    mine = (f"rank {found.rank}", Tone.MINE)
    if found.peer == DRIVER:
        return line(mine, f" {look.glyphs.horizontal} trainer")
    return line(mine, f" {look.glyphs.horizontal} {found.peer} {clip(names.get(found.peer, '?'), 16)}")


def members_page(job: Job, look: Look) -> list[Line]:
    """One line per rank, for meshes that no grid can show."""
    return [
        line(
            (f"rank {m.rank:<5}", Tone.MINE if m.mine else Tone.DIM),
            f"dp {m.dp:<4} tp {m.tp:<4} pp {m.pp:<4} cp {m.cp:<4} ",
            (m.node, Tone.MINE if m.mine else Tone.TEXT),
            (f"  {look.glyphs.right} this node" if m.mine else "", Tone.MINE),
        )
        for m in sorted(job.members, key=lambda m: m.rank)
    ]
