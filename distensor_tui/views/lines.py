"""Lines of a log file: what looks like trouble is marked, the rest is shown as it is."""

from __future__ import annotations

import re

from distensor_tui.glyphs import Glyphs
from distensor_tui.text import Line, Tone, line

_BAD = re.compile(r"\b(error|fatal|critical|traceback|exception|killed|panic)\b|Error:", re.IGNORECASE)
_WARN = re.compile(r"\bwarn(ing)?\b", re.IGNORECASE)


def row(text: str, glyphs: Glyphs) -> Line:
    tone = tone_of(text)
    mark = {Tone.BAD: glyphs.no, Tone.WARN: glyphs.warn}.get(tone, " ")
    return line((f"{mark} ", tone), (text or " ", tone))


def tone_of(text: str) -> Tone:
    """The tone of a line by the words in it: files have no field for their severity."""
    if _BAD.search(text):
        return Tone.BAD
    return Tone.WARN if _WARN.search(text) else Tone.TEXT
