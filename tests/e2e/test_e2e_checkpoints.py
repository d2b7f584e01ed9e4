"""Checkpoints over real processes: what is resumed is the uninterrupted run, under any layout."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import e2e_models as models
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Session, Trainer

DP2_PP2 = ParallelConfig(data_parallel=2, pipeline_parallel=2)


def trainer_for(
    mesh: Session, module: nn.Module, parallel: ParallelConfig, folder: Path, stages: Any = None, **options: Any
) -> Trainer:
    mapping = StageMapping(stages) if stages is not None and parallel.pipeline_parallel > 1 else None
    model = DistributedModel(copy.deepcopy(module), stage_mapping=mapping)
    options = {"optimizer": "adamw", "lr": 1e-2, "progress": False, "session": mesh, "checkpoint": folder, **options}
    return Trainer(model, parallel=parallel, **options)


def loader(seed: int = 0) -> DataLoader[Any]:
    """Six shuffled batches of eight rows; each row's first number says which it is."""
    torch.manual_seed(seed)
    rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    rows[:, 0] = torch.arange(48) / 48
    return DataLoader(TensorDataset(rows, torch.arange(48) % models.CLASSES), batch_size=8, shuffle=True)


class Recorded:
    """A loader that writes down which rows it gave."""

    def __init__(self, data: DataLoader[Any]) -> None:
        self.data = data
        self.generator = data.generator
        self.rows: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        for inputs, targets in self.data:
            self.rows.extend((inputs[:, 0] * 48).round().int().tolist())
            yield inputs, targets


class Interrupted(Exception):  # noqa: N818 - no error of anybody
    """Ends a fit in the middle, as a crash would."""


def interrupted_after(trainer: Trainer, step: int) -> Any:
    def on_step(result: Any) -> None:
        if result.step == step:
            trainer.save_checkpoint()
            raise Interrupted

    return on_step


class Dropping(models.MLP):
    """With dropout in both stages."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(F.dropout(inputs, 0.2, self.training))


OPTIONS: dict[str, Any] = {"loss": models.classify, "lr_schedule": "cosine", "ema": 0.9, "clip_norm": 0.5}


@pytest.fixture(scope="module")
def uninterrupted(mesh: Session, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(losses, rows, weights, average) of two epochs, and the folder of the same run that ended after 4 of 12 steps."""
    folder = tmp_path_factory.mktemp("run")
    module = models.MLP()
    with trainer_for(mesh, module, DP2_PP2, folder / "whole", models.MLP_TWO, **OPTIONS) as trainer:
        data = Recorded(loader(3))
        history = trainer.fit(data, epochs=2)
        result = (history.losses, data.rows, trainer.state_dict(), trainer.ema_state_dict())
    trainer = trainer_for(mesh, module, DP2_PP2, folder / "part", models.MLP_TWO, **OPTIONS)
    with pytest.raises(Interrupted), trainer:
        trainer.fit(loader(3), epochs=2, on_step=interrupted_after(trainer, 4))
    return result, folder / "part"


@pytest.mark.parametrize(
    ("parallel", "tolerance"),
    [
        (DP2_PP2, 0.0),
        (ParallelConfig(), 1e-5),
        (ParallelConfig(data_parallel=4), 1e-5),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else None,
)
def test_ckp_03_a_run_resumed_in_any_layout_is_the_uninterrupted_one(
    mesh: Session, uninterrupted: Any, tmp_path: Path, parallel: ParallelConfig, tolerance: float
) -> None:
    (losses, rows, state, average), folder = uninterrupted
    shutil.copytree(folder, tmp_path / "run")
    torch.manual_seed(77)
    with trainer_for(mesh, models.MLP(), parallel, tmp_path / "run", models.MLP_TWO, **OPTIONS) as trainer:
        data = Recorded(loader(99))
        history = trainer.fit(data, epochs=2, resume=True)
        found, found_average = trainer.state_dict(), trainer.ema_state_dict()
    assert [step.step for step in history.steps] == list(range(5, 13))
    assert data.rows == rows, "no row twice and none left out, in the same order"
    assert history.losses == (losses[4:] if tolerance == 0 else pytest.approx(losses[4:], rel=tolerance))
    for ours, theirs in ((found, state), (found_average, average)):
        assert all(torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance) for name in theirs)


def test_a_checkpoint_reads_without_us(uninterrupted: Any) -> None:
    _, folder = uninterrupted
    latest = max(folder.glob("step-*"))
    state = {}
    for file in latest.glob("model-*.safetensors"):
        state.update(load_file(file))
    models.MLP().load_state_dict(state, strict=True)
    optimizer = load_file(next(latest.glob("optimizer-*.safetensors")))
    assert float(optimizer["first.weight/step"]) == 4
    assert {name.rpartition("/")[2] for name in optimizer} == {"step", "exp_avg", "exp_avg_sq", "ema"}


def test_dropout_goes_on_with_the_masks_of_the_uninterrupted_run(mesh: Session, tmp_path: Path) -> None:
    module, batches = Dropping(), models.points(6)
    options: dict[str, Any] = {"loss": models.classify, "seed": 5}
    with trainer_for(mesh, module, ParallelConfig(), tmp_path / "a", **options) as trainer:
        whole = trainer.fit(batches).losses
    with trainer_for(mesh, module, ParallelConfig(), tmp_path / "b", checkpoint_every=2, **options) as trainer:
        trainer.gradients(batches[0])
        trainer.evaluate(batches[:1])
        first = trainer.fit(batches, max_steps=2).losses
    with trainer_for(mesh, module, ParallelConfig(), tmp_path / "b", **options) as trainer:
        second = trainer.fit(batches, resume=True).losses
    assert first + second == whole


def test_ckp_07_frozen_weights_buffers_and_ties_come_back_and_a_running_job_can_go_back(
    mesh: Session, tmp_path: Path
) -> None:
    module, batches = models.TiedLM(vocabulary=131), models.texts(6)
    module.first.requires_grad_(False)
    module.register_buffer("scale", torch.full((3,), 2.5))
    with trainer_for(mesh, module, DP2_PP2, tmp_path, models.TIED_TWO) as trainer:
        trainer.fit(batches[:3])
        saved = {name: tensor.clone() for name, tensor in trainer.model.module.state_dict().items()}
        after = [trainer.step(batch).loss for batch in batches[3:]]
        assert trainer.resume() == 3
        assert [trainer.step(batch).loss for batch in batches[3:]] == after, "back in the same job"
    other = models.TiedLM(vocabulary=131)
    other.first.requires_grad_(False)
    other.register_buffer("scale", torch.zeros(3))
    with trainer_for(mesh, other, DP2_PP2, tmp_path, models.TIED_TWO) as trainer:
        assert trainer.resume(3) == 3
        restored = trainer.model.module.state_dict()
        assert set(restored) == set(saved)
        assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
        assert [trainer.step(batch).loss for batch in batches[3:]] == after
