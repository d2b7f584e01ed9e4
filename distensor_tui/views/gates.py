"""The gates between this machine and work, and when they may change."""

from __future__ import annotations

from distensor_tui import format as fmt
from distensor_tui.model import Gate
from distensor_tui.scene import Look, View
from distensor_tui.text import Line, Span, Tone, line
from distensor_tui.views.draw import Column, table


def row(gate: Gate, look: Look) -> Line:
    mark = (look.glyphs.ok, Tone.GOOD) if gate.open else (look.glyphs.no, Tone.WARN)
    when = next_change(gate, look)
    return line(
        mark,
        (f" {label(gate):<14} ", Tone.TEXT if gate.open else Tone.STRONG),
        (gate.reading, Tone.DIM if gate.open else Tone.WARN),
        (f"  limit: {gate.limit}" if gate.limit and not gate.open else "", Tone.DIM),
        (f"  {when}" if when else "", Tone.ACCENT),
    )


def label(gate: Gate) -> str:
    """'temperature of gpu0'."""
    name = gate.name.replace("_", " ")
    return f"{name} of {gate.device}" if gate.device else name


def next_change(gate: Gate, look: Look) -> str:
    """'opens 15:02' or 'may close 07:00'."""
    if gate.next_change_at is None:
        return ""
    when = fmt.hour(gate.next_change_at, look.zone)
    return f"may close {when}" if gate.open else f"opens {when}"


COLUMNS = (
    Column("gate", least=8),
    Column("is"),
    Column("reading", least=10),
    Column("limit", least=5),
    Column("next change"),
)


def page(view: View, size: int, look: Look) -> list[Line]:
    gates = view.snapshot.node.why if view.snapshot.node else ()
    rows: list[list[Span | str]] = [
        [
            Span(label(gate), Tone.STRONG),
            Span("open", Tone.GOOD) if gate.open else Span("CLOSED", Tone.WARN),
            gate.reading,
            gate.limit or "-",
            next_change(gate, look) or "-",
        ]
        for gate in gates
    ]
    return table(COLUMNS, rows, size)
