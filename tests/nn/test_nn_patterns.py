"""Patterns over dotted names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.nn.patterns import listed, nearest, parse

NAMES = [f"model.layers.{index}.self_attn.{part}_proj.weight" for index in range(12) for part in "qkvo"]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.1", "model.layers.1.mlp.weight", True),
        ("model.layers.1", "model.layers.10.mlp.weight", False),
        ("model.layers.[0-5]", "model.layers.5.mlp.weight", True),
        ("model.layers.[0-5]", "model.layers.6.mlp.weight", False),
        ("model.layers.[0-11]", "model.layers.11.mlp.weight", True),
        ("model.layers.[0-11]", "model.layers.1.mlp.weight", True),
        ("model.layers.[8-11]", "model.layers.10.mlp.weight", True),
        ("model.layers.[8-11]", "model.layers.1.mlp.weight", False),
        ("model.layers.*.mlp.weight", "model.layers.3.mlp.weight", True),
        ("model.*.weight", "model.layers.3.weight", False),
        ("model.**.weight", "model.layers.3.weight", True),
        ("**.weight", "weight", True),
        ("**", "anything.at.all", True),
        ("model.h*_norm", "model.head_norm.bias", True),
        ("model.h*_norm", "model.norm.bias", False),
        ("block[0-3].weight", "block2.weight", True),
        ("block[0-3].weight", "block02.weight", False),
        ("lm_head", "lm_head.weight", True),
        ("lm_head", "my.lm_head.weight", False),
        ("model.layers", "model.layers_extra.weight", False),
    ],
)
def test_covers(pattern: str, name: str, expected: bool) -> None:
    assert parse(pattern).covers(name) is expected


def test_matches_is_exact() -> None:
    assert parse("a.b").matches("a.b")
    assert not parse("a.b").matches("a.b.c")
    assert not parse("a.b").matches("a")


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("", "non-empty"),
        ("a..b", "empty name"),
        (".a", "empty name"),
        ("layers.[5-2]", "smaller index first"),
        ("layers.[a-b]", "not a name"),
        ("layers.[0,1]", "not a name"),
        ("la**yers", "stand alone"),
        ("layers.(0|1)", "not a name"),
    ],
)
def test_problems_are_named(pattern: str, word: str) -> None:
    parsed = parse(pattern)
    assert parsed.problem is not None
    assert word in parsed.problem
    assert not parsed.covers("layers.0")


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 60))
def test_a_range_holds_exactly_its_indices(low: int, high: int, index: int) -> None:
    pattern = parse(f"layers.[{low}-{high}]")
    expected = low <= index <= high
    assert pattern.covers(f"layers.{index}.weight") is expected


_NAME = st.lists(st.from_regex(r"[a-z_]{1,6}[0-9]{0,2}", fullmatch=True), min_size=1, max_size=5).map(".".join)


@given(_NAME, _NAME)
def test_a_plain_name_covers_itself_and_what_is_below(name: str, below: str) -> None:
    pattern = parse(name)
    assert pattern.covers(name)
    assert pattern.covers(f"{name}.{below}")
    assert not pattern.covers(f"{name}x.{below}")
    assert not pattern.covers(f"above.{name}.{below}") or name.startswith("above")


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    assert parse(text).covers("a.b.c") in (True, False)


def test_nearest_names_what_the_user_meant() -> None:
    assert nearest("model.layer.3", NAMES)[0] == "model.layers.3"
    assert "model.layers.0.self_attn.q_proj.weight" in nearest("model.layers.*.self_attn.qproj.weight", NAMES)


def test_listed_counts_the_rest() -> None:
    assert listed("abc") == "'a', 'b', 'c'"
    assert listed("abcdefgh", 2) == "'a', 'b' and 6 more"
