"""Arithmetic in terminal cells, with wide characters too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distensor_tui import format as fmt
from distensor_tui.text import (
    Span,
    Tone,
    cells,
    changed_cells,
    clip,
    cut,
    fill,
    join,
    line,
    merged,
    pad,
    plain,
    spread,
    width,
    wrap,
)
from distensor_tui.views.draw import ascii_only, crop

TEXT = st.text(alphabet="ab [/]─━█日本é", max_size=30)
LINES = st.lists(st.builds(Span, TEXT, st.sampled_from([Tone.TEXT, Tone.BAD])), max_size=5).map(tuple)


@given(LINES, st.integers(0, 60))
def test_pad_is_exact(parts: tuple[Span, ...], size: int) -> None:
    assert width(pad(parts, size)) == size


@given(LINES, st.integers(1, 60))
def test_cut_says_that_there_was_more(parts: tuple[Span, ...], size: int) -> None:
    if width(parts) > size:
        assert "…" in plain(cut(parts, size))


@given(LINES, st.integers(0, 40), st.integers(0, 40))
@example(parts=(Span("[[[日"),), start=4, length=0)
@example(parts=(Span("日"),), start=1, length=1)
def test_crop_is_as_wide_as_its_part(parts: tuple[Span, ...], start: int, length: int) -> None:
    whole = pad(parts, 40)
    stop = min(40, start + length)
    assert width(crop(whole, start, stop)) == max(0, stop - start)


@given(st.text(alphabet="abc 日", max_size=80), st.integers(2, 20))
def test_wrapped_lines_fit_and_lose_nothing(text: str, size: int) -> None:
    lines = wrap(text, size)
    assert all(cells(part) <= size for part in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@given(TEXT, st.integers(0, 40), st.booleans())
def test_fill_is_exact(text: str, size: int, right: bool) -> None:
    assert cells(fill(text, size, right=right)) == size


@given(LINES, LINES)
def test_outside_the_changed_cells_nothing_changed(one: tuple[Span, ...], other: tuple[Span, ...]) -> None:
    before, after = pad(one, 40), pad(other, 40)
    start, stop = changed_cells(before, after)
    assert 0 <= start <= stop <= 40 or before == after
    assert plain(crop(before, 0, start)) == plain(crop(after, 0, start))
    assert plain(crop(before, stop, 40)) == plain(crop(after, stop, 40))


@given(LINES)
def test_merging_keeps_the_text_and_the_tone_of_every_mark(parts: tuple[Span, ...]) -> None:
    def marks(row: tuple[Span, ...]) -> list[tuple[str, Tone]]:
        return [(character, span.tone) for span in row for character in span.text if character != " "]

    assert plain(merged(parts)) == plain(parts)
    assert marks(merged(parts)) == marks(parts)


def test_clip_leaves_what_fits() -> None:
    assert clip("abc", 3) == "abc"
    assert clip("abcd", 3) == "ab…"


def test_spread_puts_parts_at_both_edges() -> None:
    assert plain(spread(line("ab"), line("yz"), 8)) == "ab    yz"
    assert plain(spread(line("abcdefgh"), line("yz"), 8)) == "abcde…yz"


def test_join_skips_empty_parts() -> None:
    assert plain(join([line("a"), (), line("b")], Span(" | "))) == "a | b"


def test_without_utf8_every_cell_is_ascii() -> None:
    shown = plain(ascii_only(line("a…日")))
    assert shown.isascii()
    assert len(shown) == 4


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        (fmt.memory, None, "-"),
        (fmt.memory, 0, "0 B"),
        (fmt.memory, 1023, "1023 B"),
        (fmt.memory, 1024 * 1023.9, "1.0 MiB"),
        (fmt.memory, 18.2 * 2**30, "18.2 GiB"),
        (fmt.rate, 999_600, "1.0 MB/s"),
        (fmt.rate, 640, "640 B/s"),
        (fmt.rate, 1e18, "1000000 TB/s"),
        (fmt.credits, 0, "0.000"),
        (fmt.credits, 1_840_000, "1.840"),
        (fmt.credits, 1, "0.000001"),
        (fmt.credits, -1_500_000, "-1.500"),
        (fmt.credits, 12_345_678_000_000, "12,345,678.000"),
        (fmt.short_credits, 1_840_999, "1.840"),
        (fmt.short_credits, 7, "0.000007"),
        (fmt.percent, 0.945, "94%"),
        (fmt.percent, None, "-"),
        (fmt.loss, 2.41309, "2.4131"),
        (fmt.loss, 123456.0, "1.235e+05"),
        (fmt.seconds, 0.012, "12 ms"),
        (fmt.seconds, 0.41, "0.41 s"),
        (fmt.span, 38, "38 s"),
        (fmt.span, -5, "0 s"),
        (fmt.span, 3700, "1 h 01 min"),
        (fmt.span, 274_320, "3 d 04 h"),
        (fmt.coarse, 59, "< 1 min"),
        (fmt.amount, 4812.4, "4,812"),
        (fmt.amount, 0.5, "0.5"),
    ],
)
def test_numbers_as_people_read_them(function: Callable[[float | None], str], value: float | None, shown: str) -> None:
    assert function(value) == shown


@pytest.mark.parametrize(
    ("used", "total", "shown"),
    [(None, None, "-"), (1 << 30, None, "1.0 GiB"), (None, 2 << 30, "-/2.0 GiB"), (1 << 29, 2 << 30, "0.5/2.0 GiB")],
)
def test_memory_pairs(used: int | None, total: int | None, shown: str) -> None:
    assert fmt.memory_pair(used, total) == shown
