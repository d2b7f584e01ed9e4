"""Tokens per second: of the whole job, over the whole step, from this step alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor, nn
from torch.nn import functional

from distensor.core import ParallelConfig
from distensor.core.clock import SystemClock
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer
from distensor.transport.driver import Command

SEQUENCE = 16


class Decoder(nn.Module):
    """ids, labels (rows, sequence) -> mean loss over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(32, 8)
        self.last = nn.Linear(8, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.last(self.embed(ids))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rows(count: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (count, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids}


class StepClock(SystemClock):
    """Monotonic time stands still but for what steps are said to take."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 1000.0

    def monotonic(self) -> float:
        return self.at


def timed(session: Any, clock: StepClock, seconds: Callable[[], float]) -> list[Any]:
    """Every STEP command takes `seconds()`; the list gets the speed that each one told the workers."""
    told: list[Any] = []
    open_job = session.open_job

    def opening(**words: Any) -> Any:
        connection = open_job(**words)
        command = connection.command

        def run(kind: Command, meta: Any, *rest: Any, **more: Any) -> Any:
            replies = command(kind, meta, *rest, **more)
            if kind is Command.STEP:
                told.append(json.loads(json.dumps(meta["tokens_per_second"])))
                clock.at += seconds()
            return replies

        connection.command = run
        return connection

    session.clock, session.open_job = clock, opening
    return told


def trainer(session: Any, parallel: ParallelConfig) -> Trainer:
    stages = StageMapping([["embed"], ["last"]]) if parallel.pipeline_parallel > 1 else None
    cut = ShardingSpec({"embed.weight": Shard(dim=0)}) if parallel.tensor_parallel > 1 else None
    model = DistributedModel(Decoder(), stage_mapping=stages, tp_spec=cut)
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "session": session, "progress": False}
    return Trainer(model, parallel=parallel, accumulate=4, micro_batches=1, **options)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(data_parallel=2),
        ParallelConfig(data_parallel=2, pipeline_parallel=2),
        ParallelConfig(data_parallel=2, tensor_parallel=2),
    ],
    ids=["dp2", "dp2-pp2", "dp2-tp2"],
)
def test_accumulation_and_the_cut_do_not_change_the_speed_of_the_job(parallel: ParallelConfig) -> None:
    """MET-01: one row of 16 tokens per worker and micro-batch, four accumulated, two replicas, steps of one second."""
    clock = StepClock()
    with thread_session(parallel.world_size) as session:
        timed(session, clock, lambda: 1.0)
        with trainer(session, parallel) as made:
            history = made.fit([rows(2)] * 8, max_steps=2)
    assert [step.tokens for step in history.steps] == [128, 128]
    assert [step.tokens_per_second for step in history.steps] == [128.0, 128.0]


def test_a_speed_is_of_its_own_step_and_a_new_job_begins_without_one() -> None:
    """MET-03: ten steps of 1 s, then one of 5 s: no tokens of the past over the time of the last step."""
    clock = StepClock()
    durations = iter([1.0] * 10 + [5.0] + [1.0] * 9)
    with thread_session(2) as session:
        told = timed(session, clock, lambda: next(durations))
        with trainer(session, ParallelConfig(data_parallel=2)) as made:
            history = made.fit([rows(2)] * 44, max_steps=11)
        with trainer(session, ParallelConfig(data_parallel=2)) as again:
            again.fit([rows(2)] * 8, max_steps=2)
    assert [step.tokens_per_second for step in history.steps] == [128.0] * 10 + [25.6]
    assert told[:12] == [None] + [128.0] * 10 + [None], "each step tells the speed of the one before"
    assert max(speed for speed in told if speed is not None) <= 128.0
    assert history.tokens / history.seconds == pytest.approx(128 * 11 / 15)
