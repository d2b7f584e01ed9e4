"""Optimizers, schedules and averages over real processes: what one process of plain PyTorch gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import e2e_models as models
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.optim import LrSchedule
from distensor.optim.schedules import Curve
from distensor.training import Session, Trainer

DP2_PP2 = ParallelConfig(data_parallel=2, pipeline_parallel=2)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    bare = [name for name in named if name.endswith("bias")]
    return [
        {"params": [p for name, p in named.items() if name not in bare]},
        {"params": [named[name] for name in bare], "weight_decay": 0.0},
    ]


def train_here(
    module: nn.Module, batches: list[Any], make: Callable[[Any], torch.optim.Optimizer], ema: float
) -> tuple[nn.Module, list[float], dict[str, Tensor]]:
    """(trained, losses, average) under cosine after two steps of warm-up."""
    module = copy.deepcopy(module)
    average = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = make(groups_of(module))
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches) - 2, eta_min=1e-3)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = models.run_module(module, batch, models.classify)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        for name, parameter in module.named_parameters():
            average[name].mul_(ema).add_(parameter.detach(), alpha=1 - ema)
    return module, losses, average


def test_optimizer_schedule_and_average_equal_one_process(mesh: Session) -> None:
    options = {"weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 1e-6}
    module, batches = models.MLP(), models.points(6, rows=5)
    trained, losses, average = train_here(
        module, batches, lambda groups: torch.optim.NAdam(groups, lr=1e-2, **options), ema=0.8
    )
    with Trainer(
        DistributedModel(copy.deepcopy(module), stage_mapping=StageMapping(models.MLP_TWO)),
        parallel=DP2_PP2,
        loss=models.classify,
        optimizer="nadam",
        optimizer_options={**options, "no_decay": ["**.bias"]},
        lr=1e-2,
        lr_schedule=LrSchedule(curve=Curve.COSINE, warmup_steps=2, min_lr=1e-3),
        ema=0.8,
        progress=False,
        session=mesh,
    ) as trainer:
        history = trainer.fit(batches)
        state, averages = trainer.state_dict(), trainer.ema_state_dict()
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert models.worst_difference(state, trained) <= 1e-5
    for parameter, expected in average.items():
        assert models.relative_difference(averages[parameter], expected) <= 1e-5
    module.load_state_dict(averages, strict=True)


def test_zero3_equals_one_process_in_a_third_of_the_memory(mesh: Session) -> None:
    """Four stages on each of three ranks, a vocabulary that three does not divide, tied weights, unequal replicas."""
    module, batches = models.TiedLM(vocabulary=131, width=24), models.texts(4, rows=5)
    make = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)
    trained, losses, norms = models.train_here(module, batches, make, clip_norm=0.5)
    stages = [["embed"], ["first"], ["second"], ["head"]]
    with Trainer(
        DistributedModel(copy.deepcopy(module), stage_mapping=StageMapping(stages)),
        parallel=ParallelConfig(data_parallel=3),
        optimizer="adamw",
        optimizer_options={"eps": 1e-6},
        lr=1e-2,
        clip_norm=0.5,
        sync="zero3",
        schedule="gpipe",
        micro_batches=2,
        progress=False,
        session=mesh,
    ) as trainer:
        history = trainer.fit(batches)
        state = trainer.state_dict()
        assert trainer.check_parity(batches[0]).max_relative_difference <= 1e-6
        trainer.pull()
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert models.worst_difference(state, trained) <= 1e-5
    copies = sum(p.nbytes for p in module.parameters()) + module.embed.weight.nbytes
    for rank in history.steps[-1].memory:
        assert rank.weights + rank.optimizer == pytest.approx(3 * copies / 3, rel=0.05), "weights and two moments"
        largest = 2 * module.embed.weight.nbytes
        assert rank.peak <= 1.05 * (4 * copies / 3 + largest), "a part of everything, and the largest stage twice"
