"""What is broken, in the panel that it concerns: code, cause, fix, log."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import format as fmt
from distensor_tui.model import Fault, Snapshot
from distensor_tui.scene import Look
from distensor_tui.text import Line, Span, Tone, cells, fill, line, wrap

LABEL = 6
LONGEST, SHORTEST = 4, 2
"""Rows of one cause or fix; Enter on the row, or `n`, shows all of it."""
PASSING = ("restarting",)
"""Faults that the supervisor repairs by itself."""
HERE = {
    "worker": "press 2, then l on its row",
    "device": "press 6, then l on its row",
}
"""Where this view shows the log; of the others, screen 7."""


def rows(faults: Sequence[Fault], size: int, look: Look) -> list[Line]:
    """All of them: one below the other where there is room, two rows each on a small screen."""
    draw = _short if look.narrow else _long
    return [row for fault in faults for row in draw(fault, size, look)]


def tone(fault: Fault) -> Tone:
    return Tone.WARN if fault.code in PASSING else Tone.BAD


def _mark(fault: Fault, look: Look) -> str:
    return look.glyphs.warn if fault.code in PASSING else look.glyphs.no


def when(fault: Fault, look: Look) -> str:
    """'since 14:02, next 14:05:10'."""
    parts = [f"since {fmt.hour(fault.since, look.zone)}"] if fault.since is not None else []
    if fault.retry_at is not None:
        parts.append(f"next {fmt.hour(fault.retry_at, look.zone, with_seconds=True)}")
    return ", ".join(parts)


def where(fault: Fault) -> str:
    """The log, in this view and as a command."""
    here = HERE.get(fault.part, "press 7")
    return f"{here}, or {fault.log}" if fault.log else here


def _long(fault: Fault, size: int, look: Look) -> list[Line]:
    said = when(fault, look)
    head = line((f"{_mark(fault, look)} {fault.code}", tone(fault)), (f"  {said}" if said else "", Tone.DIM))
    parts = (("cause", fault.cause, tone(fault)), ("fix", fault.fix, Tone.STRONG), ("log", where(fault), Tone.DIM))
    return [head, *(row for name, text, how in parts if text for row in _part(name, text, size, how))]


def _part(name: str, text: str, size: int, how: Tone) -> list[Line]:
    found = wrap(text, max(8, size - LABEL - 2))[:LONGEST]
    first, *others = found
    label = Span("  " + fill(name, LABEL), Tone.DIM)
    return [line(label, (first, how)), *(line(" " * (LABEL + 2), (other, how)) for other in others)]


def _short(fault: Fault, size: int, look: Look) -> list[Line]:
    """The cause in one row, what to do and where to look below it."""
    return [line((f"{_mark(fault, look)} {fault.code}: {fault.cause}", tone(fault))), *remedy(fault, size)]


def remedy(fault: Fault, size: int) -> list[Line]:
    """What to do in two rows at most, and where to look where that still fits."""
    *rows, last = wrap(fault.fix, max(8, size - LABEL))[:SHORTEST] or [""]
    brief = f"   log {HERE.get(fault.part, 'press 7').removeprefix('press ')}"
    log = brief if LABEL + cells(last) + cells(brief) <= size else ""
    texts = [*((row, "") for row in rows), (last, log)]
    labels = ["  fix ", *(" " * LABEL for _ in rows)]
    return [
        line((label, Tone.DIM), (text, Tone.STRONG), (more, Tone.DIM))
        for label, (text, more) in zip(labels, texts, strict=True)
    ]


def failed(snapshot: Snapshot, section: str) -> tuple[Fault, ...]:
    """A section that the supervisor failed to build."""
    if section not in snapshot.failed:
        return ()
    fix = "`distensor bugreport` packs what is needed to repair it; the other panels and the work go on"
    return (
        Fault(
            part="section",
            subject=section,
            code="section_failed",
            cause=snapshot.failed[section],
            fix=fix,
            log="distensor logs",
        ),
    )


def facts(faults: Sequence[Fault], look: Look) -> list[tuple[str, str]]:
    """For the details of a worker or device."""
    found = []
    for fault in faults:
        said = when(fault, look)
        found += [("fault", fault.code + (f", {said}" if said else "")), ("cause", fault.cause), ("fix", fault.fix)]
        found += [("log", fault.log)] if fault.log else []
    return found
