"""ParallelConfig and rank arithmetic, against recorded tables and by property."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core import Axis, ParallelConfig, RankLayout
from distensor.core.errors import ConfigError

RECORDED = json.loads((Path(__file__).parent / "data" / "rank_layout.json").read_text())


def config_of(case: dict[str, Any]) -> ParallelConfig:
    order = "-".join(name for name in case["order"].split("-") if name != "ep")
    return ParallelConfig(
        data_parallel=case["dp"],
        tensor_parallel=case["tp"],
        pipeline_parallel=case["pp"],
        context_parallel=case["cp"],
        order=order,
    )


@pytest.mark.parametrize("case", RECORDED["decoder"], ids=lambda case: f"{case['order']}-{case['world_size']}")
def test_groups_equal_the_recorded_tables(case: dict[str, Any]) -> None:
    config = config_of(case)
    layout = RankLayout(config)
    assert config.world_size == case["world_size"]
    plain = {name: groups for name, groups in case["groups"].items() if "embedding" not in name}
    assert plain
    for name, expected in plain.items():
        axes = [Axis(part) for part in name.split("-")]
        assert layout.groups(*axes) == expected, name


WITHOUT_EXPERTS = [case["args"] for case in RECORDED["errors"] if case["args"]["ep"] == 1]


@pytest.mark.parametrize("args", WITHOUT_EXPERTS, ids=lambda args: args["order"])
def test_an_order_that_omits_a_used_axis_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="order="):
        config_of(args)


@pytest.mark.parametrize("order", ["tp-cp-pp", "tp-tp-pp-dp", "tp,cp,pp,dp", "", "tp-cp-pp-dp-xx", 3])
def test_bad_orders_are_refused(order: Any) -> None:
    with pytest.raises(ConfigError, match="order="):
        ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, context_parallel=2, order=order)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_bad_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel"):
        ParallelConfig(tensor_parallel=size)


sizes = st.integers(1, 3)
orders = st.permutations(["tp", "cp", "pp", "dp"]).map("-".join)


@given(dp=sizes, tp=sizes, pp=sizes, cp=sizes, order=orders, axes=st.sets(st.sampled_from(Axis)))
def test_groups_partition_the_mesh(dp: int, tp: int, pp: int, cp: int, order: str, axes: set[Axis]) -> None:
    config = ParallelConfig(
        data_parallel=dp, tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp, order=order
    )
    layout = RankLayout(config)
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(config.world_size))
    for group in groups:
        for rank in group:
            assert layout.group_of(rank, *axes) == group
            place = layout.coordinates(rank)
            assert layout.rank(dp=place.dp, tp=place.tp, pp=place.pp, cp=place.cp) == rank
            first = layout.coordinates(group[0])
            assert all(place.on(axis) == first.on(axis) for axis in Axis if axis not in axes)


def test_the_leftmost_axis_varies_fastest() -> None:
    layout = RankLayout(ParallelConfig(data_parallel=2, pipeline_parallel=2, order="pp-dp-tp-cp"))
    assert [(layout.coordinates(rank).pp, layout.coordinates(rank).dp) for rank in range(4)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]


def test_a_rank_outside_the_mesh_is_refused() -> None:
    layout = RankLayout(ParallelConfig(data_parallel=2))
    with pytest.raises(ConfigError, match="rank 2"):
        layout.coordinates(2)
    with pytest.raises(ConfigError, match="dp=2"):
        layout.rank(dp=2)
