"""Tones as terminal styles: one dark palette; text that must be read has a contrast of at least 4.5 to 1."""

from __future__ import annotations

from rich.style import Style

from distensor_tui.text import Tone

BACKGROUND = "#0e1318"
INK = "#0e1318"

COLOURS: dict[Tone, tuple[str, bool]] = {
    Tone.TEXT: ("#c9d4df", False),
    Tone.STRONG: ("#f2f6fa", True),
    Tone.DIM: ("#8695a5", False),
    Tone.FAINT: ("#5d6b79", False),
    Tone.BORDER: ("#31404f", False),
    Tone.TITLE: ("#9fc6ea", True),
    Tone.KEY: ("#f0b45e", True),
    Tone.BRAND: ("#5cc8ff", True),
    Tone.ACCENT: ("#5cc8ff", False),
    Tone.GOOD: ("#63d690", True),
    Tone.WARN: ("#f3c14b", False),
    Tone.BAD: ("#ff7a72", True),
    Tone.MINE: ("#63d690", True),
    Tone.TRACK: ("#3a4855", False),
    Tone.FILL_1: ("#1c4660", False),
    Tone.FILL_2: ("#23607f", False),
    Tone.FILL_3: ("#2d7ba2", False),
    Tone.FILL_4: ("#419dca", False),
    Tone.FILL_5: ("#5cc8ff", False),
    Tone.COMPUTE: ("#5cc8ff", False),
    Tone.SYNC: ("#c792ea", False),
    Tone.WAIT: ("#7c8a98", False),
    Tone.CURSOR: ("#ffffff", True),
}
PILLS = {
    Tone.PILL_GOOD: "#63d690",
    Tone.PILL_WARN: "#f3c14b",
    Tone.PILL_BAD: "#ff7a72",
    Tone.PILL_CALM: "#8fb8de",
}


FAINTER = frozenset({Tone.DIM, Tone.FAINT, Tone.BORDER, Tone.TRACK, Tone.WAIT})


def plain_styles() -> dict[Tone, Style]:
    """For NO_COLOR: the terminal's own colours; what matters is bold, what does not is dim, the state is reversed."""
    found = {tone: Style(bold=bold, dim=tone in FAINTER) for tone, (_, bold) in COLOURS.items()}
    return found | {tone: Style(bold=True, reverse=True) for tone in PILLS}


def styles() -> dict[Tone, Style]:
    found = {tone: Style(color=colour, bgcolor=BACKGROUND, bold=bold) for tone, (colour, bold) in COLOURS.items()}
    pills = {tone: Style(color=INK, bgcolor=colour, bold=True) for tone, colour in PILLS.items()}
    return found | pills
