"""ShardingSpec against parameters."""

from __future__ import annotations

import pytest

from distensor.core.errors import ShardingError
from distensor.nn import Replicate, Shard, ShardingSpec

SHAPES = {
    **{f"layers.{index}.q.weight": (8, 4) for index in range(11)},
    **{f"layers.{index}.norm.weight": (4,) for index in range(11)},
}


def test_rules_apply_to_what_they_match() -> None:
    found = ShardingSpec({"layers.*.q.weight": Shard(dim=0), "layers.*.norm": Replicate()}).resolve(SHAPES)
    assert found["layers.10.q.weight"] == Shard(dim=0)
    assert found["layers.10.norm.weight"] == Replicate()
    assert len(found) == len(SHAPES)


def test_rules_that_disagree_name_both_patterns() -> None:
    spec = ShardingSpec({"layers.*.q.weight": Shard(dim=0), "layers.0.q.weight": Shard(dim=1)})
    wanted = (
        r"'layers\.0\.q\.weight' is Shard\(dim=0\) by pattern 'layers\.\*\.q\.weight' "
        r"and Shard\(dim=1\) by 'layers\.0\.q\.weight'"
    )
    with pytest.raises(ShardingError, match=wanted):
        spec.resolve(SHAPES)


def test_rules_that_agree_may_overlap() -> None:
    spec = ShardingSpec({"layers.*.q.weight": Shard(dim=0), "layers.0.q.weight": Shard(dim=0)})
    assert len(spec.resolve(SHAPES)) == 11


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ShardingError, match=r"'layers\.\*\.k\.weight'.*matches no parameter.*'layers\.0\.q\.weight'"):
        ShardingSpec({"layers.*.k.weight": Shard(dim=0)}).resolve(SHAPES)


def test_a_plain_index_is_that_index_alone() -> None:
    assert list(ShardingSpec({"layers.1.q": Shard(dim=0)}).resolve(SHAPES)) == ["layers.1.q.weight"]


def test_a_dim_that_the_parameter_lacks_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"Shard\(dim=1\), but 'layers\.0\.norm\.weight' has 1 dims: \[4\]"):
        ShardingSpec({"layers.*.norm": Shard(dim=1)}).resolve(SHAPES)
    assert ShardingSpec({"layers.*.q": Shard(dim=-2)}).resolve(SHAPES)


@pytest.mark.parametrize(
    "rules", [["layers"], {"layers": 0}, {"layers": "shard"}, {"layers..q": Shard(dim=0)}, {"": Replicate()}]
)
def test_what_is_no_rule_is_refused(rules: object) -> None:
    with pytest.raises(ShardingError):
        ShardingSpec(rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", ["0", 1.0, True, None])
def test_shard_takes_a_dim_number(dim: object) -> None:
    with pytest.raises(ShardingError, match="Shard"):
        Shard(dim=dim)  # type: ignore[arg-type]
