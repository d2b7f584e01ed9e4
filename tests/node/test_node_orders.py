"""The driver's words: right ones are read, all others are refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.errors import ProgramRejectedError
from distensor.core.schedules import Schedule
from distensor.node.orders import Pace, TiedWeight, parse_plan, parse_step, split_batches, split_parts

PLAN: dict[str, Any] = {
    "schedule": "gpipe",
    "stages": 2,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {}},
    "clip_norm": 1,
    "norm_type": "2",
    "seed": 7,
    "tied": [[[0, "embed"], [1, "head"]]],
    "sharded": ["embed"],
    "recompute": "layer",
    "sync": "zero3",
}
STEP: dict[str, Any] = {"step": 3, "lr": 0.1, "total_steps": 5, "tokens_per_second": 12}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def test_a_plan_is_read() -> None:
    plan = parse_plan(PLAN)
    assert (plan.schedule, plan.stages, plan.clip_norm, plan.seed) == (Schedule.GPIPE, 2, 1.0, 7)
    assert plan.tied == (TiedWeight(holders=((0, "embed"), (1, "head"))),)
    assert parse_plan({**PLAN, "clip_norm": None}).clip_norm is None


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": "never"}, {"schedule": []}, {"stages": 0}, {"stages": True}, {"stages": "2"},
        {"stages": float("inf")}, {"optimizer": []}, {"optimizer": None}, {"optimizer": {"name": "sgd"}},
        {"clip_norm": float("nan")}, {"clip_norm": -1}, {"clip_norm": "1"}, {"seed": -1}, {"seed": 1.5},
        {"norm_type": "3"}, {"norm_type": []}, {"sharded": None}, {"sharded": "embed"}, {"sharded": [1]},
        {"recompute": "all"}, {"recompute": None},
        {"sync": "zero2"}, {"sync": None},
        {"seed": 1 << 60}, {"tied": 3}, {"tied": [[["0", "a"]]]}, {"tied": [[[0]]]}, {"tied": [[[0, 1]]]},
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProgramRejectedError, match="|".join(change)):
        parse_plan({**PLAN, **change})


@given(st.sampled_from(sorted(PLAN)), JSON)
def test_no_plan_crashes_the_reader(key: str, value: Any) -> None:
    with contextlib.suppress(ProgramRejectedError):  # the one error that it may raise
        parse_plan({**PLAN, key: value})


def test_a_step_is_read() -> None:
    order = parse_step(STEP)
    assert (order.step, order.lr, order.total_steps, order.tokens_per_second) == (3, 0.1, 5, 12.0)
    order = parse_step({"step": 1, "lr": 0})
    assert (order.total_steps, order.tokens_per_second) == (None, None)
    assert order.pace == Pace(warm_up=None, measure=False)
    assert parse_step({**STEP, "warm_up": [2, 0], "measure": True}).pace == Pace(warm_up=(2, 0), measure=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 0), ("step", "1"), ("step", None), ("step", 1 << 64), ("step", 10**4000),
        ("lr", float("nan")), ("lr", float("inf")), ("lr", -0.1), ("lr", None), ("lr", True),
        ("total_steps", 2.0), ("total_steps", 1 << 64), ("tokens_per_second", float("inf")),
        ("tokens_per_second", "fast"), ("warm_up", 3), ("warm_up", [1.5]), ("warm_up", [True]), ("measure", 1),
    ],
)  # fmt: skip
def test_a_wrong_step_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ProgramRejectedError, match=f"{key}="):
        parse_step({**STEP, key: value})


def test_batches_are_sorted_into_micro_batches() -> None:
    flagged = torch.zeros(2, requires_grad=True)
    batches = split_batches({"micro_batches": 2}, {"0/x": torch.ones(1), "1/x": flagged, "1/a/b": torch.ones(3)})
    assert [sorted(batch) for batch in batches] == [["x"], ["a/b", "x"]]
    assert not batches[1]["x"].requires_grad, "a flag in a peer's header decides nothing here"


@pytest.mark.parametrize("count", [-1, 1.0, None, True, 1 << 20])
def test_a_wrong_count_is_refused(count: Any) -> None:
    with pytest.raises(ProgramRejectedError, match="micro_batches="):
        split_batches({"micro_batches": count}, {})


@pytest.mark.parametrize("key", ["x", "2/x", "-1/x", "/x", "9" * 5000 + "/x"])
def test_a_wrong_batch_name_is_refused(key: str) -> None:
    with pytest.raises(ProgramRejectedError, match="below 2"):
        split_batches({"micro_batches": 2}, {key: torch.ones(1)})


def test_parts_are_sorted_by_stage() -> None:
    text = torch.frombuffer(bytearray(b"{}"), dtype=torch.uint8)
    programs, weights = split_parts({"program/1": text, "weight/1/a/b": torch.ones(2)})
    assert programs == {1: b"{}"}
    assert torch.equal(weights[1]["a/b"], torch.ones(2))


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("elsewhere", torch.ones(1)),
        ("program/x", torch.ones(1)),
        ("weight/" + "1" * 5000 + "/a", torch.ones(1)),
        ("program/0", torch.ones(3, dtype=torch.bfloat16)),
        ("program/0", torch.ones(3, requires_grad=True)),
        ("program/0", torch.ones(2, 2, dtype=torch.uint8)),
    ],
)
def test_wrong_parts_are_refused(key: str, tensor: torch.Tensor) -> None:
    with pytest.raises(ProgramRejectedError):
        split_parts({key: tensor})
