"""context_parallel through the whole Trainer, the ranks as threads, against one process."""

from __future__ import annotations

import copy
from typing import Any

import mesh_models as models
import pytest
import torch
from thread_mesh import thread_session

from distensor.core import ParallelConfig
from distensor.core.errors import BatchError, ConfigError
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer


def trainer_of(session: Any, module: Any, parallel: ParallelConfig, **options: Any) -> Trainer:
    stages = StageMapping(models.STAGES) if parallel.pipeline_parallel > 1 else None
    model = DistributedModel(copy.deepcopy(module), stage_mapping=stages)
    options = {"lr": 1e-2, "optimizer_options": {"eps": 1e-6}, "session": session, "progress": False, **options}
    return Trainer(model, parallel=parallel, **options)


@pytest.mark.parametrize(
    ("parallel", "method", "options"),
    [
        (ParallelConfig(context_parallel=3, data_parallel=2, order="cp-dp-tp-pp"), "ring", {"sync": "zero3"}),
        (ParallelConfig(context_parallel=2, pipeline_parallel=2), "ulysses", {"schedule": "zero_bubble"}),
        (
            ParallelConfig(context_parallel=2, pipeline_parallel=2, data_parallel=2, order="pp-dp-cp-tp"),
            "all_gather",
            {},
        ),
        (ParallelConfig(context_parallel=2), "all_gather", {"recompute": "layer", "context_shares": [3, 2]}),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else str(value),
)
def test_equal_to_one_process(parallel: ParallelConfig, method: str, options: dict[str, Any]) -> None:
    """Batches change their length from step to step, and most lengths do not divide."""
    module = models.Decoder()
    batches = [batch for length in (9, 12, 7) for batch in models.texts(1, length=length, seed=length)]
    reference, losses, norms = models.train_here(module, batches, clip=0.5)
    with (
        thread_session(parallel.world_size) as session,
        trainer_of(
            session, module, parallel, clip_norm=0.5, micro_batches=2, context_attention=method, **options
        ) as trainer,
    ):
        history = trainer.fit(batches)
        parity = trainer.check_parity(batches[0])
        state = trainer.state_dict()
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert parity.max_relative_difference <= 1e-5
    assert models.worst_difference(state, reference) <= 1e-5


def test_what_has_no_sequence_is_refused_before_any_traffic() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    batch = torch.randn(6, 4), torch.randn(6, 4)
    with thread_session(2) as session:
        trainer = trainer_of(
            session,
            module,
            ParallelConfig(context_parallel=2),
            loss=lambda out, batch: (out - batch[1]).square().mean(),
        )
        with pytest.raises(BatchError, match=r"inputs \[batch, 4\]"):
            trainer.step(batch)


def test_a_batch_shorter_than_the_axis_is_refused() -> None:
    module = models.Decoder()
    with thread_session(3) as session, trainer_of(session, module, ParallelConfig(context_parallel=3)) as trainer:
        trainer.step(models.texts(1)[0])
        with pytest.raises(BatchError, match="sequence is 2"):
            trainer.step(models.texts(1, length=2)[0])


def test_ulysses_with_fewer_heads_than_ranks_names_both() -> None:
    with thread_session(5) as session:
        trainer = trainer_of(session, models.Decoder(), ParallelConfig(context_parallel=5), context_attention="ulysses")
        with pytest.raises(ConfigError, match="4 heads for context_parallel=5"):
            trainer.step(models.texts(1)[0])
