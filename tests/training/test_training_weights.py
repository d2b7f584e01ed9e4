"""Weights as the user made them: what reaches the ranks is bit for bit the module's, and none of bfloat16 stalls."""

from __future__ import annotations

import copy
from typing import Any

import mesh_models as models
import pytest
import torch
from test_training_mesh import trainer_of
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.core.layouts import WeightLayout
from distensor.nn import DistributedModel
from distensor.training import Trainer


class OneWeight(nn.Module):
    """inputs (rows, 1) -> the mean of weight * inputs: a gradient of one for inputs of one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.weight).mean()


@pytest.mark.parametrize("sync", ["allreduce", "zero3"])
def test_small_updates_of_a_bfloat16_weight_add_up(sync: str) -> None:
    """Case DTY-03: a hundred updates of 0.001, each below half a unit in the last place of 1.0."""
    inputs = torch.ones(2, 1, dtype=torch.bfloat16)
    with (
        thread_session(2) as session,
        Trainer(
            DistributedModel(OneWeight(torch.bfloat16)), parallel=ParallelConfig(data_parallel=2), optimizer="sgd",
            lr=1e-3, loss_weight="rows", sync=sync, session=session, progress=False,
        ) as trainer,
    ):  # fmt: skip
        for _ in range(100):
            trainer.step(inputs)
        weight = trainer.state_dict()["weight"]
    assert weight.dtype is torch.bfloat16
    assert weight.item() == torch.tensor(0.9).bfloat16().item()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_initial_weights_do_not_depend_on_how_they_are_cut(ranks: int, dim: int) -> None:
    """Case NUM-07: they are made whole, in the user's process, and cut afterwards."""
    torch.manual_seed(4)
    weight = nn.Linear(10, 7).weight.detach()
    layout = WeightLayout.even(weight.shape, dim, ranks)
    assert torch.equal(layout.join([layout.take(weight, rank).clone() for rank in range(ranks)]), weight)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (ParallelConfig(data_parallel=2, pipeline_parallel=2), {}),
        (ParallelConfig(data_parallel=2, pipeline_parallel=2), {"sync": "zero3"}),
        (ParallelConfig(data_parallel=3), {"sync": "zero3"}),
    ],
)
def test_before_a_step_the_ranks_hold_the_modules_weights(parallel: ParallelConfig, options: dict[str, Any]) -> None:
    module = models.Decoder()
    with thread_session(parallel.world_size) as session, trainer_of(session, module, parallel, **options) as trainer:
        trainer.evaluate(models.texts(1))  # places the job
        state = trainer.state_dict()
    expected = copy.deepcopy(module).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    assert state.keys() <= expected.keys()
