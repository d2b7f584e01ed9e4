"""StageMapping against names: every mistake is an error that names the things."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.errors import StageMappingError
from distensor.nn import StageMapping

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{index}.{part}.weight" for index in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")),
    "model.norm.weight",
    "lm_head.weight",
]
GOOD = [["model.embed_tokens", "model.layers.[0-5]"], ["model.layers.[6-11]", "model.norm", "lm_head"]]


def test_a_good_mapping_gives_each_name_its_stage() -> None:
    stages = StageMapping(GOOD).resolve(NAMES)
    assert list(stages) == NAMES
    assert stages["model.layers.5.mlp.up_proj.weight"] == 0
    assert stages["model.layers.10.mlp.up_proj.weight"] == 1
    assert StageMapping(GOOD).stage_count == 2


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    mapping = StageMapping([["model.embed", "model.layers"], ["model.norm", "lm_head"]])
    with pytest.raises(StageMappingError, match=r"stage 0, pattern 'model\.embed' matches no parameter.*embed_tokens"):
        mapping.resolve(NAMES)


def test_a_parameter_in_two_stages_names_both_patterns() -> None:
    mapping = StageMapping([["model.embed_tokens", "model.layers.[0-6]"], GOOD[1]])
    wanted = (
        r"'model\.layers\.6\.self_attn\.q_proj\.weight' is in stage 0 \(pattern 'model\.layers\.\[0-6\]'\) "
        r"and stage 1 \(pattern 'model\.layers\.\[6-11\]'\)"
    )
    with pytest.raises(StageMappingError, match=wanted):
        mapping.resolve(NAMES)


def test_a_parameter_in_no_stage_is_named() -> None:
    mapping = StageMapping([["model.embed_tokens", "model.layers.[0-5]"], ["model.layers.[6-11]", "lm_head"]])
    with pytest.raises(StageMappingError, match=r"no stage for 'model\.norm\.weight'"):
        mapping.resolve(NAMES)


def test_a_range_that_reaches_too_far_is_a_mistake() -> None:
    mapping = StageMapping([["layers.[0-3]"]])
    names = [f"layers.{index}.weight" for index in (0, 2)]
    with pytest.raises(StageMappingError, match=r"layers\.\[0-3\].*last parameter.*layers\.2"):
        mapping.resolve(names)
    modules = [f"layers.{index}" for index in range(4)]  # 1 and 3 are modules without parameters
    assert mapping.resolve(names, modules=modules) == dict.fromkeys(names, 0)


def test_a_range_that_is_too_short_leaves_names_over() -> None:
    mapping = StageMapping([["model.embed_tokens", "model.layers.[0-5]"], ["model.norm", "lm_head"]])
    with pytest.raises(StageMappingError, match=r"'model\.layers\.6\.self_attn\.q_proj\.weight'.* and 7 more"):
        mapping.resolve(NAMES)


def test_the_same_stage_may_name_a_parameter_twice() -> None:
    mapping = StageMapping([["model", "model.norm"], ["lm_head"]])
    assert set(mapping.resolve(NAMES).values()) == {0, 1}


def test_tied_names_may_have_stages_of_their_own() -> None:
    names = NAMES[:-1]
    stages = StageMapping(GOOD).resolve(names, {"lm_head.weight": "model.embed_tokens.weight"})
    assert stages["model.embed_tokens.weight"] == 0
    assert stages["lm_head.weight"] == 1


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    names = NAMES[:-1]
    mapping = StageMapping([GOOD[0], ["model.layers.[6-11]", "model.norm"]])
    assert "lm_head.weight" not in mapping.resolve(names, {"lm_head.weight": "model.embed_tokens.weight"})


@pytest.mark.parametrize(
    ("stages", "word"),
    [
        ([], r"StageMapping\(\[\]\)"),
        ("model", "StageMapping"),
        (None, "StageMapping"),
        ([[]], "stage 0 of the StageMapping is"),
        (["model", "lm_head"], "stage 0 of the StageMapping is 'model'"),
        ([["model"], ["lm_head", 3]], "stage 1, pattern 3"),
        ([["model.layers.[5-2]"]], r"range \[5-2\] is empty"),
    ],
)
def test_what_is_no_mapping_is_refused(stages: object, word: str) -> None:
    with pytest.raises(StageMappingError, match=word):
        StageMapping(stages)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_consecutive_ranges_always_cover(sizes: list[int]) -> None:
    edges = [0, *itertools.accumulate(sizes)]
    names = [f"layers.{index}.weight" for index in range(edges[-1])]
    mapping = StageMapping([[f"layers.[{low}-{high - 1}]"] for low, high in itertools.pairwise(edges)])
    stages = mapping.resolve(names)
    assert [list(stages.values()).count(stage) for stage in range(len(sizes))] == sizes
