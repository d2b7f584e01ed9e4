"""Keywords of Trainer: what is wrong is refused by name, before anything happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
from torch import nn

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.problems import SeveralProblemsError
from distensor.core.schedules import Schedule
from distensor.nn import DistributedModel, Replicate, Shard, ShardingSpec
from distensor.training import Trainer
from distensor.training.options import TrainerOptions


class Model:
    """Only what the options ask of a model."""

    stage_count, tp_spec = 2, object()
    placements: Mapping[str, Any] = {"weight": Shard(dim=0)}


GOOD: dict[str, Any] = {
    "model": Model(),
    "parallel": ParallelConfig(pipeline_parallel=2),
    "schedule": "1f1b",
    "micro_batches": None,
    "sync": "allreduce",
    "clip_norm": None,
    "norm_type": 2.0,
    "precision": "fp32",
    "recompute": "none",
    "accumulate": 1,
    "context_attention": "all_gather",
    "context_shares": None,
    "checkpoint": None,
    "backend": "tls",
    "lr_schedule": None,
    "seed": 0,
}


def options(**changes: Any) -> TrainerOptions:
    return TrainerOptions.of(**cast("Any", {**GOOD, **changes}))


def test_good_options_are_taken() -> None:
    made = options(clip_norm=1)
    assert made.schedule is Schedule.ONE_F_ONE_B
    assert made.micro_batches == 4
    assert made.clip_norm == 1.0
    one = options(parallel=ParallelConfig(data_parallel=2), micro_batches=None)
    assert one.micro_batches == 1


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("precision", "fp16"),
        ("backend", "gloo"),
        ("backend", "nccl"),
        ("schedule", "dualpipev"),
    ],
)
def test_an_option_that_is_not_built_yet_is_refused_by_name(keyword: str, value: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"{keyword}=.*{value}"):
        options(**{keyword: value})


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("sync", "magic"),
        ("precision", "fp8"),
        ("recompute", "all"),
        ("recompute", None),
        ("context_attention", "flash"),
        ("context_shares", [1, 2]),
        ("context_shares", [0]),
        ("backend", "mpi"),
        ("schedule", "2f2b"),
        ("micro_batches", 0),
        ("micro_batches", 2.0),
        ("micro_batches", True),
        ("accumulate", 0),
        ("context_attention", 2),
        ("accumulate", 1.5),
        ("norm_type", 3.0),
        ("norm_type", "2"),
        ("norm_type", True),
        ("clip_norm", 0),
        ("clip_norm", -1.0),
        ("clip_norm", float("nan")),
        ("clip_norm", float("inf")),
        ("lr_schedule", 3),
        ("seed", -1),
        ("wait", 1),
        ("priority", -1),
        ("priority", True),
        ("parallel", 4),
    ],
)
def test_a_wrong_value_is_refused_with_keyword_and_value(keyword: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{keyword}=.*{value}") as caught:
        options(**{keyword: value})
    assert not isinstance(caught.value, UnsupportedOptionError)


def test_stages_that_do_not_divide_name_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"2 stages.*pipeline_parallel=4"):
        options(parallel=ParallelConfig(pipeline_parallel=4))


def test_all_problems_are_named_in_one_message() -> None:
    with pytest.raises(SeveralProblemsError) as caught:
        options(schedule="1f1v", sync="zero", seed=-1, parallel=ParallelConfig(pipeline_parallel=3))
    text = str(caught.value)
    assert text.startswith("4 problems; nothing has been sent")
    assert len(caught.value.problems) == 4
    for part in ("did you mean '1f1b'", "did you mean 'zero3'", "seed=-1", "2 stages"):
        assert part in text


def test_the_trainer_reports_its_own_keywords_along_with_them() -> None:
    with pytest.raises(SeveralProblemsError) as caught:
        Trainer(
            DistributedModel(nn.Linear(2, 1)), parallel=ParallelConfig(pipeline_parallel=2), name="no name",
            optimizer="adamv", clip_norm=-1.0,
        )  # fmt: skip
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("spec", "says"), [(None, "the model has no tp_spec"), (ShardingSpec({"weight": Replicate()}), "cuts nothing")]
)
def test_tensor_parallelism_without_a_cut_names_both(spec: ShardingSpec | None, says: str) -> None:
    model = DistributedModel(nn.Linear(2, 2), tp_spec=spec)
    with pytest.raises(ConfigError, match=rf"tensor_parallel=2(.|\n)*{says}.*Shard"):
        options(model=model, parallel=ParallelConfig(tensor_parallel=2))
