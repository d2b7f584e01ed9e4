"""What a machine without a key says: four lines about what to do, and what happens then."""

from __future__ import annotations

from distensor_tui.scene import Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, fill, line, wrap
from distensor_tui.views import devices
from distensor_tui.views.draw import Panel, allot, box

STEPS = (
    ("1", "Get a key from who runs the hub that you want to work for; it begins with dtj_."),
    (
        "2",
        "Press a here (or Enter) and paste it. It is tried with the hub first, then kept where only you can read it.",
    ),
    ("3", "This machine joins the hub. Work comes by itself as soon as a trainer asks for machines like this one."),
    ("4", "Leave the supervisor running; close this view with q. p pauses it, 5 shows your limits, 4 what you earn."),
)
STEP_CELLS = 3


def body(view: View, height: int, look: Look) -> list[Line]:
    """The welcome, and below it the devices that would work."""
    size = look.width - 4
    rows = [EMPTY, line(("This machine has no key yet, so it does no work and earns nothing.", Tone.STRONG)), EMPTY]
    rows += [row for number, text in STEPS for row in _step(number, text, min(size, 100))]
    rows += [EMPTY, line(("a", Tone.KEY), (" give this machine its key", Tone.ACCENT), *_other(look))]
    found = devices.panel(view, size, look)
    heights = allot(height, [(len(rows) + 2, len(rows) + 2), (len(found.rows) + 2, 3)])
    panels = zip((Panel("Welcome to disTensor", "", rows), found), heights, strict=True)
    return [row for panel, h in panels for row in box(panel, look.width, h, look.glyphs)]


def _step(number: str, text: str, size: int) -> list[Line]:
    first, *others = wrap(text, size - STEP_CELLS)
    head = line((fill(number, STEP_CELLS), Tone.ACCENT), first)
    return [head, *(line(" " * STEP_CELLS + other) for other in others)]


def _other(look: Look) -> tuple[Span, ...]:
    text = f"   {look.glyphs.between} without this view: distensor auth login"
    return (Span(text, Tone.DIM),) if look.width >= 70 else ()
