"""All axes of the mesh against one process, the ranks as threads."""

from __future__ import annotations

import copy
from typing import Any

import mesh_models as models
import pytest
from thread_mesh import thread_session

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Replicate, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer


def trainer_of(session: Any, module: Any, parallel: ParallelConfig, **options: Any) -> Trainer:
    stages = StageMapping(models.STAGES) if parallel.pipeline_parallel > 1 else None
    rules = {name: Shard(dim=dim) for name, dim in models.SHARDED.items()}
    model = DistributedModel(
        copy.deepcopy(module), stage_mapping=stages, tp_spec=ShardingSpec({**rules, "norm.weight": Replicate()})
    )
    options = {"lr": 1e-2, "optimizer_options": {"eps": 1e-6}, "session": session, "progress": False, **options}
    return Trainer(model, parallel=parallel, **options)


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(data_parallel=2, pipeline_parallel=2, order="dp-pp-tp-cp"),
        ParallelConfig(tensor_parallel=2),
        ParallelConfig(tensor_parallel=2, pipeline_parallel=2),
        ParallelConfig(data_parallel=2, tensor_parallel=3, order="dp-tp-pp-cp"),
        ParallelConfig(tensor_parallel=2, context_parallel=2, order="cp-tp"),
        ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, order="pp-tp-dp-cp"),
        ParallelConfig(data_parallel=2, tensor_parallel=2, context_parallel=2, order="tp-dp-cp-pp"),
        ParallelConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2, order="cp-pp-tp-dp"),
        ParallelConfig(data_parallel=2, pipeline_parallel=2, context_parallel=2, order="cp-dp-pp-tp"),
    ],
    ids=ParallelConfig.describe,
)
def test_losses_norms_weights_and_gradients_equal_one_process(parallel: ParallelConfig, norm_type: Any) -> None:
    module, batches = models.Decoder(), models.texts(5)
    reference, losses, norms = models.train_here(module, batches, norm_type=float(norm_type), clip=0.5)
    with (
        thread_session(parallel.world_size) as session,
        trainer_of(session, module, parallel, clip_norm=0.5, norm_type=norm_type, micro_batches=2) as trainer,
    ):
        history = trainer.fit(batches)
        parity = trainer.check_parity(batches[0])
        state = trainer.state_dict()
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert parity.max_relative_difference <= (1e-5 if parallel.context_parallel > 1 else 1e-6)
    assert models.worst_difference(state, reference) <= 1e-5
    assert models.worst_difference(dict(trainer.model.module.named_parameters()), reference) <= 1e-5
