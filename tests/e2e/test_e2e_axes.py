"""All axes of the mesh over real processes: loss, norm, gradients and weights of one process."""

from __future__ import annotations

import copy
from typing import Any

import mesh_models as models
import pytest

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Session, Trainer
from distensor.training.sessions import open_session


def trainer_of(mesh: Session, module: Any, parallel: ParallelConfig, **options: Any) -> Trainer:
    model = DistributedModel(
        copy.deepcopy(module),
        stage_mapping=StageMapping(models.STAGES) if parallel.pipeline_parallel > 1 else None,
        tp_spec=ShardingSpec({name: Shard(dim=dim) for name, dim in models.SHARDED.items()}),
    )
    options = {"lr": 1e-2, "optimizer_options": {"eps": 1e-6}, "session": mesh, "progress": False, **options}
    return Trainer(model, parallel=parallel, **options)


SLOW = pytest.mark.slow  # threads in one process do the same in tests/training/test_training_mesh.py


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2),
        pytest.param(
            ParallelConfig(data_parallel=2, tensor_parallel=2, context_parallel=2, order="dp-tp-cp-pp"), marks=SLOW
        ),
        pytest.param(
            ParallelConfig(data_parallel=2, pipeline_parallel=2, context_parallel=2, order="pp-cp-dp-tp"), marks=SLOW
        ),
        ParallelConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2, order="cp-pp-tp-dp"),
    ],
    ids=ParallelConfig.describe,
)
def test_training_equals_one_process(mesh: Session, parallel: ParallelConfig) -> None:
    module, batches = models.Decoder(), models.texts(5)
    reference, losses, norms = models.train_here(module, batches, clip=0.5)
    with trainer_of(mesh, module, parallel, clip_norm=0.5, micro_batches=2) as trainer:
        first = trainer.check_parity(batches[0])
        history = trainer.fit(batches)
        parity = trainer.check_parity(batches[1])
        state = trainer.state_dict()
    tolerance = 1e-5 if parallel.context_parallel > 1 else 1e-6
    assert max(first.max_relative_difference, parity.max_relative_difference) <= tolerance
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert models.worst_difference(state, reference) <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sixteen_workers_on_all_axes_equal_one_process() -> None:
    parallel = ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    module, batches = models.Decoder(), models.texts(6)
    reference, losses, norms = models.train_here(module, batches)
    opened = open_session("local", workers=16, nodes=2)
    try:
        with trainer_of(opened, module, parallel, micro_batches=2) as trainer:
            parity = trainer.check_parity(batches[0])
            history = trainer.fit(batches)
            state = trainer.state_dict()
    finally:
        opened.close()
    print(f"losses {history.losses} against {losses}; gradients apart by {parity.max_relative_difference:.1e}")
    assert parity.max_relative_difference <= 1e-5
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert models.worst_difference(state, reference) <= 1e-5
