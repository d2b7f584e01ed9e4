"""Weights cut over replicas together with the other axes, against one process, the ranks as threads."""

from __future__ import annotations

from typing import Any

import mesh_models as models
import pytest
from test_training_mesh import trainer_of
from thread_mesh import thread_session

from distensor.core import ParallelConfig


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (ParallelConfig(data_parallel=2, context_parallel=2), {}),
        (ParallelConfig(data_parallel=2, tensor_parallel=2), {"norm_type": "inf"}),
        (ParallelConfig(data_parallel=2, pipeline_parallel=2), {"schedule": "zero_bubble", "recompute": "layer"}),
        (ParallelConfig(data_parallel=2, pipeline_parallel=2, tensor_parallel=2), {}),
        (ParallelConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2, order="pp-cp-tp-dp"), {}),
        (ParallelConfig(data_parallel=3), {"micro_batches": 2, "accumulate": 2}),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else None,
)
def test_it_combines_with_every_axis(parallel: ParallelConfig, options: dict[str, Any]) -> None:
    """Losses, norms before clipping, gradients, weights and averages of four steps of AdamW."""
    module, batches = models.Decoder(), models.texts(4)
    norm_type = float(options.get("norm_type", 2.0))
    together = options.get("accumulate", 1) > 1
    reference, losses, norms = models.train_here(
        module, batches[:1] * 4 if together else batches, norm_type=norm_type, clip=0.5
    )
    data = batches[:1] * 8 if together else batches
    with (
        thread_session(parallel.world_size) as session,
        trainer_of(
            session, module, parallel, sync="zero3", clip_norm=0.5, ema=0.5, **{"micro_batches": 2, **options}
        ) as trainer,
    ):
        history = trainer.fit(data)
        parity = trainer.check_parity(batches[0])
        state, averages = trainer.state_dict(), trainer.ema_state_dict()
        memory = history.steps[-1].memory
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert parity.max_relative_difference <= (1e-5 if parallel.context_parallel > 1 else 1e-6)
    assert models.worst_difference(state, reference) <= 1e-5
    assert averages.keys() == state.keys()
    group = parallel.data_parallel * parallel.context_parallel
    assert len(memory) == parallel.world_size
    whole = sum(p.nbytes for p in reference.parameters()) / parallel.tensor_parallel
    assert all(rank.weights <= 1.5 * whole / group / parallel.pipeline_parallel + 4096 for rank in memory)


def test_with_bf16_and_recomputation_it_gives_the_bits_of_whole_copies() -> None:
    module, batches = models.Decoder(), models.texts(3)
    parallel = ParallelConfig(data_parallel=2, pipeline_parallel=2)
    losses = []
    for sync in ("allreduce", "zero3"):
        options = {"sync": sync, "precision": "bf16", "recompute": "stage", "micro_batches": 2}
        with thread_session(4) as session, trainer_of(session, module, parallel, **options) as trainer:
            losses.append([*trainer.fit(batches).losses, trainer.evaluate(batches)])
    assert losses[0] == losses[1]
