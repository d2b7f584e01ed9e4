"""What happened on this node, the newest last."""

from __future__ import annotations

from dataclasses import replace

from distensor_tui import format as fmt
from distensor_tui.model import Event, Severity
from distensor_tui.scene import Look, View
from distensor_tui.text import Line, Tone, fill, line, wrap
from distensor_tui.views.draw import Panel, paragraph

SOURCE_WIDTH = 10
INDENT = 8 + 3 + SOURCE_WIDTH + 1


def panel(view: View, size: int, look: Look, *, wrap_rows: bool = False) -> Panel:
    events = view.snapshot.events
    if not events:
        text = "Waiting for events..." if events is None else "Nothing has happened yet."
        return Panel("Events", "7", paragraph(text, size, Tone.DIM))
    bad = sum(event.severity is not Severity.INFO for event in events)
    note = line((fmt.plural(bad, "notice"), Tone.WARN)) if bad else ()
    rows = [part for event in events for part in (_wrapped(event, size, look) if wrap_rows else [row(event, look)])]
    return Panel("Events", "7", rows, note, tail=True)


def _wrapped(event: Event, size: int, look: Look) -> list[Line]:
    """The text of a long event goes on below its beginning, where a column is high and narrow."""
    first, *others = wrap(event.text, max(20, size - INDENT))
    head = row(replace(event, text=first), look)
    return [head, *(line((" " * INDENT, Tone.DIM), other) for other in others)]


def row(event: Event, look: Look) -> Line:
    mark, tone = severity(event, look)
    return line(
        (fmt.hour(event.at, look.zone, with_seconds=True), Tone.DIM),
        (f" {mark} ", tone),
        (fill(event.source, SOURCE_WIDTH) + " ", Tone.DIM),
        (event.text, Tone.TEXT if event.severity is Severity.INFO else tone),
    )


def severity(event: Event, look: Look) -> tuple[str, Tone]:
    if event.severity is Severity.ERROR:
        return look.glyphs.no, Tone.BAD
    if event.severity is Severity.WARNING:
        return look.glyphs.warn, Tone.WARN
    return look.glyphs.info, Tone.DIM


def detail(event: Event, look: Look) -> list[tuple[str, str]]:
    return [
        ("at", fmt.hour(event.at, look.zone, with_seconds=True)),
        ("severity", str(event.severity)),
        ("source", event.source),
        ("text", event.text),
    ]
