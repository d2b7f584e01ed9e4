"""The connections of this node's ranks: round trip, rate, bytes; the slowest one by name."""

from __future__ import annotations

from typing import TypeAlias

from distensor_tui import format as fmt
from distensor_tui.model import Job, PeerLink
from distensor_tui.scene import Look
from distensor_tui.text import Line, Span, Tone, clip, fill, line, width

Pairs: TypeAlias = dict[frozenset[int], PeerLink]
LABEL = 12
DRIVER = -1
WAYS = {"here": "this machine", "lan": "local network", "ipv6": "IPv6", "public": "internet", "relay": "relay"}
OLD_SECONDS = 30.0
"""A round trip is measured every few seconds on a link that is not full; one that is older says so."""


def by_pair(job: Job) -> Pairs:
    """The link of each two ranks, seen from either end."""
    return {frozenset((link.rank, link.peer)): link for link in job.links}


def by_peer(job: Job) -> dict[int, list[PeerLink]]:
    """The links of this node's ranks to each other rank."""
    found: dict[int, list[PeerLink]] = {}
    for link in job.links:
        found.setdefault(link.peer, []).append(link)
    return found


def once(job: Job) -> list[PeerLink]:
    """Every connection of this node's ranks; one between two of them once."""
    mine = {member.rank for member in job.members if member.mine}
    return [found for found in job.links if not (found.peer in mine and found.peer < found.rank)]


def slowest(job: Job) -> PeerLink | None:
    """The link between ranks with the longest round trip; None where fewer than two were measured."""
    known = [found for found in once(job) if found.rtt_ms is not None and found.peer != DRIVER]
    return max(known, key=lambda found: found.rtt_ms or 0.0) if len(known) > 1 else None


def link_rows(job: Job, size: int, look: Look) -> list[Line]:
    """The slowest by name, then every connection, those with the longest round trip first, the trainer's last."""
    if not job.links:
        return [line((fill("links", LABEL), Tone.DIM), ("no traffic yet", Tone.DIM))]
    names = {member.rank: member.node for member in job.members}
    ordered = sorted(once(job), key=lambda one: (one.peer == DRIVER, -(one.rtt_ms or 0.0), one.rank, one.peer))
    label = max(width(_ends(found, names, look)) for found in ordered)
    rows = [_link_row(found, i, names, label, look) for i, found in enumerate(ordered)]
    sums = [line((f"  sum {fmt.memory(found.sent + found.received)}", Tone.DIM)) for found in ordered]
    if all(width(row) + width(more) <= size for row, more in zip(rows, sums, strict=True)):
        rows = [(*row, *more) for row, more in zip(rows, sums, strict=True)]
    worst = slowest(job)
    return rows if worst is None else [_slowest_row(worst, names, look), *rows]


def _slowest_row(found: PeerLink, names: dict[int, str], look: Look) -> Line:
    return (
        Span(fill("slowest", LABEL), Tone.DIM),
        *_ends(found, names, look),
        Span(f"  {text(found)}", Tone.WARN),
    )


def text(found: PeerLink) -> str:
    """'41 ms, sent 1.2 MB/s, received 0.9 MB/s', with the age of a round trip that is old."""
    old = found.rtt_age_s is not None and found.rtt_age_s >= OLD_SECONDS
    age = f" ({fmt.span(found.rtt_age_s)} old)" if old and found.rtt_age_s is not None else ""
    trip = "round trip not measured" if found.rtt_ms is None else f"{fmt.milliseconds(found.rtt_ms)}{age}"
    way = "" if not found.path else f"{WAYS.get(found.path, found.path)}, "
    return f"{way}{trip}, sent {fmt.rate(found.sent_rate)}, received {fmt.rate(found.received_rate)}"


def peer_text(peer: int) -> str:
    return "trainer" if peer == DRIVER else str(peer)


def _link_row(found: PeerLink, index: int, names: dict[int, str], label: int, look: Look) -> Line:
    glyphs = look.glyphs
    ends = _ends(found, names, look)
    return (
        Span(fill("" if index else "links", LABEL), Tone.DIM),
        *ends,
        Span(" " * (label - width(ends) + 2)),
        Span(f"{fmt.milliseconds(found.rtt_ms):>7}  "),
        Span(f"{glyphs.up} {fmt.rate(found.sent_rate):>9}  {glyphs.down} {fmt.rate(found.received_rate):>9}"),
        *_way(found),
    )


def _way(found: PeerLink) -> Line:
    """By which way, where the supervisor says it; a relay costs time and somebody's bytes, so it stands out."""
    if not found.path:
        return ()
    return (Span(f"  {WAYS.get(found.path, found.path)}", Tone.WARN if found.path == "relay" else Tone.DIM),)


def _ends(found: PeerLink, names: dict[int, str], look: Look) -> Line:
    mine = (f"rank {found.rank}", Tone.MINE)
    if found.peer == DRIVER:
        return line(mine, f" {look.glyphs.horizontal} trainer")
    return line(mine, f" {look.glyphs.horizontal} {found.peer} {clip(names.get(found.peer, '?'), 16)}")
