"""Boxes, bars, charts, tables and the sharing of heights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor_tui.glyphs import ASCII, UNICODE, Glyphs, for_terminal
from distensor_tui.text import Span, Tone, line, plain, width
from distensor_tui.views.draw import (
    Column,
    Panel,
    allot,
    bar,
    beside,
    box,
    chart,
    lay_over,
    section,
    shares,
    sparkline,
    table,
)


def shown(lines: list[tuple[Span, ...]]) -> list[str]:
    return [plain(row) for row in lines]


def test_a_box_has_its_title_key_and_note_in_the_frame() -> None:
    panel = Panel("Jobs", "2", [line("one")], line("note"))
    assert shown(box(panel, 24, 4, UNICODE)) == [
        "╭─ Jobs 2 ────── note ─╮",
        "│ one                  │",
        "│                      │",
        "╰──────────────────────╯",
    ]


@pytest.mark.parametrize(("tail", "rows"), [(False, ["one", "… 3 more (press 7)"]), (True, ["three", "four"])])
def test_too_many_rows_say_how_many_are_hidden_or_show_the_last(tail: bool, rows: list[str]) -> None:
    panel = Panel("Log", "7", [line(text) for text in ("one", "two", "three", "four")], tail=tail)
    assert [text.strip() for text in shown(section(panel, 30, 3, UNICODE))[1:]] == rows


@given(st.text(max_size=40), st.text(max_size=40), st.integers(2, 60), st.integers(0, 8))
def test_every_box_has_its_size(title: str, note: str, size: int, height: int) -> None:
    panel = Panel(title, "1", [line("x" * 100)] * 3, line(note))
    lines = box(panel, size, height, UNICODE)
    assert len(lines) == height
    assert all(width(row) == size for row in lines)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "──────────"),
        (0.0, "──────────"),
        (0.01, "━─────────"),
        (0.5, "━━━━━─────"),
        (1.0, "━" * 10),
        (7.0, "━" * 10),
    ],
)
def test_bars(share: float | None, text: str) -> None:
    assert plain(bar(share, 10, UNICODE)) == text


@pytest.mark.parametrize(
    ("values", "size", "text"),
    [([], 5, ""), ([1.0], 5, "▁"), ([1, 2, 3, 4, 5, 6, 7, 8], 8, "▁▂▃▄▅▆▇█"), ([8, 1], 1, "▁"), ([3, 3, 3], 3, "▁▁▁")],
)
def test_sparklines(values: list[float], size: int, text: str) -> None:
    assert sparkline(values, size, UNICODE) == text


def test_a_chart_falls_from_its_greatest_to_its_least_value() -> None:
    assert shown(chart([3.0, 2.0, 1.0], ("3", "1"), 8 + 3, 3, ASCII)) == [
        "      3 #  ",
        "        #= ",
        "      1 ##_",
    ]


def test_a_flat_chart_stands_in_the_middle_with_one_label() -> None:
    assert shown(chart([5.0, 5.0], ("5", "5"), 8 + 2, 3, ASCII)) == ["      5   ", "        __", "        ##"]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@given(values=st.lists(st.floats(-1e9, 1e9), max_size=50), size=st.integers(9, 40), height=st.integers(1, 9))
def test_every_chart_has_its_height(glyphs: Glyphs, values: list[float], size: int, height: int) -> None:
    lines = chart(values, ("9", "1"), size, height, glyphs)
    assert len(lines) == height
    assert all(width(row) in (8, size) for row in lines)


def test_tables_align_and_shrink_the_widest_column_first() -> None:
    columns = (Column("name", least=4), Column("n", right=True))
    assert shown(table(columns, [["a long name", "7"], ["b", "12"]], 40)) == [
        "name          n",
        "a long name   7",
        "b            12",
    ]
    assert shown(table(columns, [["a long name", "7"]], 9)) == ["name    n", "a lon…  7"]


@pytest.mark.parametrize(
    ("total", "needs", "heights"),
    [
        (20, [(5, 2), (5, 2)], [5, 15]),
        (8, [(5, 2), (5, 2)], [5, 3]),
        (5, [(5, 2), (5, 2)], [3, 2]),
        (3, [(5, 2), (5, 2)], [2, 1]),
        (0, [(5, 2), (5, 2)], [0, 0]),
        (7, [(3, 3), (9, 2), (9, 2)], [3, 2, 2]),
        (4, [], []),
    ],
)
def test_heights_are_shared_top_first_and_the_last_takes_the_rest(
    total: int, needs: list[tuple[int, int]], heights: list[int]
) -> None:
    assert allot(total, needs) == heights


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.integers(0, 80))
def test_shares_add_up(values: list[float], size: int) -> None:
    found = shares(values, size)
    assert sum(found) == (size if sum(values) > 0 else 0)
    assert min(found) >= 0


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=6))
def test_shared_heights_add_up(total: int, needs: list[tuple[int, int]]) -> None:
    heights = allot(total, [(max(pair), min(pair)) for pair in needs])
    assert sum(heights) == total
    assert min(heights) >= 0


def test_a_lid_covers_the_middle_and_dims_the_rest() -> None:
    frame = [line("abcdefgh")] * 3
    covered = lay_over(frame, [line(("XX", Tone.BAD))], 8)
    assert shown(covered) == ["abcdefgh", "abcXXfgh", "abcdefgh"]
    assert covered[0][0].tone is Tone.FAINT


def test_panels_stand_beside_each_other() -> None:
    assert shown(beside([line("a"), line("b")], [line("c"), line("d")])) == ["ac", "bd"]


@pytest.mark.parametrize(
    ("environ", "encoding", "glyphs"),
    [
        ({"TERM": "xterm"}, "utf-8", UNICODE),
        ({"TERM": "xterm", "LANG": "de_DE.UTF-8"}, "UTF-8", UNICODE),
        ({"TERM": "linux", "LANG": "C.UTF-8"}, "utf-8", ASCII),
        ({"TERM": "xterm"}, "ascii", ASCII),
        ({"TERM": "xterm", "LANG": "de_DE.ISO-8859-1"}, "utf-8", ASCII),
        ({"TERM": "xterm", "LC_ALL": "C", "LANG": "de_DE.UTF-8"}, "utf-8", ASCII),
    ],
)
def test_terminals_without_utf8_get_ascii(environ: dict[str, str], encoding: str, glyphs: Glyphs) -> None:
    assert for_terminal(environ, encoding) is glyphs
