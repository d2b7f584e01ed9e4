"""Split backwards together with every other axis and option, the ranks as threads."""

from __future__ import annotations

from typing import Any

import mesh_models as models
import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer

FOUR = [["embed", "positions"], ["layers.0"], ["layers.1"], ["norm", "head"]]


def trainer_of(session: Any, parallel: ParallelConfig, stages: list[list[str]], **options: Any) -> Trainer:
    spec = ShardingSpec({name: Shard(dim=dim) for name, dim in models.SHARDED.items()})
    model = DistributedModel(
        models.Decoder(),
        stage_mapping=StageMapping(stages),
        tp_spec=spec if parallel.tensor_parallel > 1 else None,
    )
    return Trainer(model, parallel=parallel, micro_batches=3, session=session, progress=False, **options)


@pytest.mark.parametrize(
    ("parallel", "schedule", "options"),
    [
        (ParallelConfig(tensor_parallel=2, pipeline_parallel=2), "zero_bubble", {}),
        (ParallelConfig(context_parallel=2, pipeline_parallel=2), "zero_bubble", {}),
        (ParallelConfig(data_parallel=2, pipeline_parallel=2), "zero_bubble", {"sync": "zero3"}),
        (ParallelConfig(tensor_parallel=2, pipeline_parallel=2), "zbv", {"recompute": "layer"}),
        (ParallelConfig(data_parallel=2, pipeline_parallel=2), "zbv", {"sync": "zero3"}),
        (ParallelConfig(context_parallel=2, pipeline_parallel=2), "interleaved", {}),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else str(value),
)
def test_gradients_equal_one_process(parallel: ParallelConfig, schedule: str, options: dict[str, Any]) -> None:
    stages = models.STAGES if schedule == "zero_bubble" else FOUR
    batches = [models.texts(1, length=length, seed=length)[0] for length in (9, 7)]
    with (
        thread_session(parallel.world_size) as session,
        trainer_of(session, parallel, stages, schedule=schedule, **options) as trainer,
    ):
        for batch in batches:
            parity = trainer.check_parity(batch)
            assert parity.gradient_difference <= (1e-5 if parallel.context_parallel > 1 else 1e-6)
            trainer.step(batch)


def test_bfloat16_gradients_have_the_same_bits_split_or_not() -> None:
    """Casts of weights are a part of what is put off."""
    parallel = ParallelConfig(pipeline_parallel=2)
    found: list[dict[str, Tensor]] = []
    for schedule in ("1f1b", "zero_bubble"):
        with (
            thread_session(2) as session,
            trainer_of(session, parallel, models.STAGES, schedule=schedule, precision="bf16") as trainer,
        ):
            found.append(trainer.gradients(models.texts(1)[0]))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
