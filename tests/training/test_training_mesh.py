"""All axes of the mesh against one process, the ranks as threads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mesh_models as models
import pytest
import torch
from thread_mesh import thread_session

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Replicate, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer

EVERYTHING = ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, context_parallel=2)


def trainer_of(session: Any, module: Any, parallel: ParallelConfig, **options: Any) -> Trainer:
    stages = StageMapping(models.STAGES) if parallel.pipeline_parallel > 1 else None
    rules = {name: Shard(dim=dim) for name, dim in models.SHARDED.items()}
    model = DistributedModel(
        copy.deepcopy(module), stage_mapping=stages, tp_spec=ShardingSpec({**rules, "norm.weight": Replicate()})
    )
    options = {"lr": 1e-2, "optimizer_options": {"eps": 1e-6}, "session": session, "progress": False, **options}
    return Trainer(model, parallel=parallel, **options)


@pytest.mark.parametrize(
    ("parallel", "norm_type"),
    [
        (ParallelConfig(), 2.0),
        (ParallelConfig(data_parallel=2, pipeline_parallel=2, order="dp-pp-tp-cp"), "inf"),
        (ParallelConfig(tensor_parallel=2), 1.0),
        (ParallelConfig(tensor_parallel=2, pipeline_parallel=2), "inf"),
        (ParallelConfig(data_parallel=2, tensor_parallel=3, order="dp-tp-pp-cp"), 2.0),
        (ParallelConfig(tensor_parallel=2, context_parallel=2, order="cp-tp"), 2.0),
        (EVERYTHING, 2.0),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else str(value),
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


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
def test_a_stage_without_gradients_takes_part_in_the_norm(norm_type: Any) -> None:
    """The last stage holds cut weights and whole norms; the first is frozen and has no gradient at all."""
    module, (batch,) = models.Decoder(tied=False), models.texts(1)
    for part in (module.embed, module.positions, module.layers[0]):
        part.requires_grad_(False)
    module(**batch).backward()
    trained = [p.grad for p in module.parameters() if p.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(trained, float(norm_type)))
    parallel = ParallelConfig(tensor_parallel=2, pipeline_parallel=2)
    with thread_session(4) as session, trainer_of(session, module, parallel, norm_type=norm_type) as trainer:
        assert trainer.step(batch).grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (ParallelConfig(data_parallel=2, tensor_parallel=2), {"sync": "zero3"}),
        (ParallelConfig(tensor_parallel=2, context_parallel=2), {"sync": "zero3", "recompute": "layer"}),
        (ParallelConfig(tensor_parallel=2, pipeline_parallel=2), {"schedule": "zero_bubble", "accumulate": 2}),
        (ParallelConfig(pipeline_parallel=2, context_parallel=2), {"schedule": "zero_bubble", "recompute": "stage"}),
        (ParallelConfig(tensor_parallel=2, context_parallel=2), {"accumulate": 3, "context_attention": "ring"}),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else "-".join(map(str, value.values())),
)
def test_options_and_axes_go_together(parallel: ParallelConfig, options: dict[str, Any]) -> None:
    """Batches of one window are trained on here as one batch."""
    module, batches = models.Decoder(), models.texts(4)
    size = options.get("accumulate", 1)
    windows = [batches[at : at + size] for at in range(0, len(batches), size)]
    joined = [{name: torch.cat([batch[name] for batch in window]) for name in window[0]} for window in windows]
    reference, losses, norms = models.train_here(module, joined, clip=0.5)
    with (
        thread_session(parallel.world_size) as session,
        trainer_of(session, module, parallel, clip_norm=0.5, micro_batches=2, **options) as trainer,
    ):
        history = trainer.fit(batches)
        state = trainer.state_dict()
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert models.worst_difference(state, reference) <= 1e-5


def test_dropout_of_whole_values_is_the_same_on_all_tensor_ranks() -> None:
    """Between the cut projections every rank holds the same values, and drops the same ones as a rank alone does."""
    losses = []
    for parallel in (ParallelConfig(), ParallelConfig(tensor_parallel=2)):
        module = models.Decoder(dropout=0.3)
        with thread_session(parallel.world_size) as session, trainer_of(session, module, parallel) as trainer:
            losses.append(trainer.fit(models.texts(3)).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] != pytest.approx(models.train_here(models.Decoder(), models.texts(3))[1], rel=1e-3)


def test_evaluation_files_and_small_batches_on_cut_weights(tmp_path: Path) -> None:
    """One row for two replicas: the ranks of the other one have nothing to do, and all agree on that."""
    module, batches = models.Decoder(), models.texts(3)
    parallel = ParallelConfig(data_parallel=2, tensor_parallel=2, context_parallel=2)
    with thread_session(8) as session, trainer_of(session, module, parallel, ema=0.5) as trainer:
        expected = float(module(**batches[0]).detach())
        assert trainer.evaluate(batches[:1]) == pytest.approx(expected, rel=1e-5)
        assert trainer.check_parity(models.texts(1, rows=1)[0]).max_relative_difference <= 1e-5
        trainer.step(batches[0])
        before = trainer.state_dict()
        trainer.save(str(tmp_path / "weights"))
        assert trainer.step(batches[1]).step == 2
        averages, after = trainer.ema_state_dict(), trainer.state_dict()
        trainer.load(str(tmp_path / "weights"))
        again = trainer.state_dict()
    assert all(torch.equal(again[name], before[name]) for name in before)
    start = dict(module.named_parameters())
    for name, value in averages.items():
        mean = 0.25 * start[name].detach() + 0.25 * before[name] + 0.5 * after[name]
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
