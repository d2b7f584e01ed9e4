"""The picture of a frame: well-formed, complete, and without tricks of foreign text."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from test_tui_screens import VIEWS, scene

from distensor_tui.frame import frame
from distensor_tui.palette import COLOURS, PILLS, styles
from distensor_tui.svg import CELL_W, MARGIN, picture
from distensor_tui.text import Tone, line

TEXT = "{http://www.w3.org/2000/svg}text"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(TEXT)]


def test_every_word_of_the_frame_is_in_the_picture() -> None:
    shown = " ".join(texts(picture(frame(scene(VIEWS["earning"](), (120, 40))), "atlas-3")))
    for word in ("EARNING", "NVIDIA RTX 4090", "[atlas-3:1]", "2.1 MB/s", "quit view"):
        assert word in shown, word


def test_hostile_text_is_escaped() -> None:
    found = texts(picture([line("<script>&[red]")], "<b>"))
    assert found == ["<b>", "<script>&[red]"]


def test_words_stand_where_their_cells_are() -> None:
    root = ET.fromstring(picture([line("ab", ("  cd", Tone.BAD))], "t"))
    places = [float(element.attrib["x"]) for element in root.iter(TEXT)][1:]
    assert places == [round(MARGIN, 1), round(MARGIN + 4 * CELL_W, 1)]


def test_an_empty_frame_is_a_picture_too() -> None:
    assert texts(picture([], "t")) == ["t"]


def test_every_tone_has_a_style() -> None:
    assert set(styles()) == set(Tone) == {*COLOURS, *PILLS}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_that_must_be_read_has_contrast() -> None:
    decoration = {tone for tone in Tone if tone.value.startswith("fill")} | {Tone.BORDER, Tone.TRACK, Tone.FAINT}
    for tone, (colour, _) in COLOURS.items():
        if tone not in decoration:
            assert contrast(colour, "#0e1318") >= 4.5, tone
    for tone, colour in PILLS.items():
        assert contrast(colour, "#0e1318") >= 4.5, tone
