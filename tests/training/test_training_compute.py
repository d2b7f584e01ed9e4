"""How the ranks compute, over a whole mesh: bfloat16 and recomputed activations."""

from __future__ import annotations

from typing import Any

import mesh_models as models
import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer

PARALLEL = ParallelConfig(data_parallel=2, pipeline_parallel=2)


def trainer_of(session: Any, **options: Any) -> Trainer:
    model = DistributedModel(models.Decoder(), stage_mapping=StageMapping(models.STAGES))
    return Trainer(model, parallel=PARALLEL, lr=1e-2, session=session, progress=False, **options)


def trained(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
    with thread_session(PARALLEL.world_size) as session, trainer_of(session, **options) as trainer:
        return trainer.fit(models.texts(3)).losses, trainer.state_dict()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_recomputed_activations_change_no_bit(schedule: str) -> None:
    kept = trained(schedule=schedule)
    for mode in ("layer", "stage"):
        losses, weights = trained(schedule=schedule, recompute=mode)
        assert losses == kept[0]
        assert all(torch.equal(weights[name], value) for name, value in kept[1].items())


def test_bfloat16_is_eager_autocast_on_the_mesh_too() -> None:
    with thread_session(PARALLEL.world_size) as session, trainer_of(session, precision="bf16") as trainer:
        parity = trainer.check_parity(models.texts(1)[0])
        assert all(value.dtype is torch.float32 for value in trainer.state_dict().values())
    assert parity.loss_difference <= 1e-3
    assert 0 < parity.gradient_difference <= 2**-7, "rounding of bfloat16, and no more"
