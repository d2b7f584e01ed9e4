"""How the ranks compute, over a whole mesh: bfloat16 and recomputed activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mesh_models as models
import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer

STAGED = ParallelConfig(data_parallel=2, pipeline_parallel=2)
SPLIT = ParallelConfig(tensor_parallel=2, context_parallel=2)


def trainer_of(session: Any, parallel: ParallelConfig, **options: Any) -> Trainer:
    stages = StageMapping(models.STAGES) if parallel.pipeline_parallel > 1 else None
    rules = {name: Shard(dim=dim) for name, dim in models.SHARDED.items()}
    model = DistributedModel(models.Decoder(), stage_mapping=stages, tp_spec=ShardingSpec(rules))
    return Trainer(model, parallel=parallel, lr=1e-2, session=session, progress=False, **options)


def trained(parallel: ParallelConfig, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    with thread_session(parallel.world_size) as session, trainer_of(session, parallel, **options) as trainer:
        return trainer.fit(models.texts(2)).losses, trainer.state_dict()


@pytest.mark.parametrize(
    ("parallel", "modes", "options"),
    [
        (STAGED, ["stage"], {"schedule": "1f1b"}),
        (STAGED, ["stage"], {"sync": "zero3", "precision": "bf16"}),
        (STAGED, ["layer"], {"schedule": "zero_bubble"}),
        (SPLIT, ["layer", "stage"], {"micro_batches": 2, "precision": "bf16"}),
    ],
    ids=["1f1b", "zero3-bf16", "zero_bubble", "tp-cp-bf16"],
)
def test_recomputed_activations_change_no_bit(
    parallel: ParallelConfig, modes: list[str], options: Mapping[str, Any]
) -> None:
    kept = trained(parallel, **options)
    for mode in modes:
        losses, weights = trained(parallel, **options, recompute=mode)
        assert losses == kept[0]
        assert all(torch.equal(weights[name], value) for name, value in kept[1].items())


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(tensor_parallel=2, pipeline_parallel=2), SPLIT],
    ids=ParallelConfig.describe,
)
def test_bfloat16_is_eager_autocast_on_the_mesh_too(parallel: ParallelConfig) -> None:
    with thread_session(parallel.world_size) as session, trainer_of(session, parallel, precision="bf16") as trainer:
        parity = trainer.check_parity(models.texts(1)[0])
        assert all(value.dtype is torch.float32 for value in trainer.state_dict().values())
    assert parity.loss_difference <= 1e-3
    assert 0 < parity.gradient_difference <= 2**-7, "rounding of bfloat16, and no more"
