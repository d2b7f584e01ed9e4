"""Pipelines whose stages sleep instead of computing: real executors, real planes, links as slow as one likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from node_kit import on_all
from torch import Tensor, nn

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.pipeline_simulation import NO_TIME, LinkSeconds, Simulation, StageSeconds, simulate
from distensor.core.schedules import Schedule, actions_of_rank, rank_of_stage, stages_of_rank
from distensor.node.pipeline import PipelineExecutor
from distensor.program import Cut, StageRunner, WeightGradients, capture, cut
from distensor.testing.slow_links import SlowPlane
from distensor.transport import DataPlane


class Chain(nn.Module):
    """Small on purpose: what a stage takes is what it sleeps."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Sleep(torch.autograd.Function):
    """The value, and a sleep when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        SYSTEM_CLOCK.sleep(ctx.seconds)
        return gradients[0], None


class SleepingRunner:
    """A stage that takes `seconds`, its arithmetic aside."""

    def __init__(self, runner: StageRunner, seconds: StageSeconds) -> None:
        self._runner = runner
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(
        self, inputs: Mapping[str, Tensor], *, put_off: WeightGradients | None = None, **options: Any
    ) -> dict[str, Tensor]:
        SYSTEM_CLOCK.sleep(self._seconds.forward)
        made = self._runner.forward(inputs, put_off=put_off, **options)
        inside = self._seconds.input_gradient
        if put_off is None:
            inside += self._seconds.weight_gradient
        else:
            put_off.put(-1, self._sleep_for_weights)
        slept = [name for name, value in made.items() if value.requires_grad][:1]
        return {**made, **{name: _Sleep.apply(made[name], inside) for name in slept}}  # type: ignore[no-untyped-call]

    def _sleep_for_weights(self) -> list[tuple[Tensor, Tensor]]:
        SYSTEM_CLOCK.sleep(self._seconds.weight_gradient)
        return []


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline to run: `seconds` for each stage, `link` between any two ranks and each way."""

    schedule: Schedule
    ranks: int
    micro_batches: int
    seconds: Sequence[StageSeconds]
    link: LinkSeconds = NO_TIME
    warm_up: Sequence[int] | None = None

    def place(self, stage: int) -> int:
        return rank_of_stage(self.schedule, stage, ranks=self.ranks)

    def actions(self, rank: int) -> Any:
        return actions_of_rank(
            self.schedule, rank=rank, ranks=self.ranks, stages=len(self.seconds), micro_batches=self.micro_batches,
            warm_up=self.warm_up,
        )  # fmt: skip

    def simulated(self) -> Simulation:
        links = {(a, b): self.link for a in range(self.ranks) for b in range(self.ranks) if a != b}
        lists = [self.actions(rank) for rank in range(self.ranks)]
        return simulate(lists, seconds=self.seconds, place=self.place, links=links)


def pieces_of(stages: int) -> Cut:
    captured = capture(Chain(stages), torch.ones(3, 2))
    return cut(captured, {f"layers.{stage}": stage for stage in range(stages)})


def measured(case: Case, planes: Mapping[int, DataPlane], pieces: Cut, sequence: int) -> tuple[float, list[int]]:
    """Seconds from the first rank's start to the last rank's end, and what each rank held at once."""
    name = pieces.programs[0].inputs[0].name
    batches = [{name: torch.ones(3, 2)}] * case.micro_batches
    with ExitStack() as undo:
        used: dict[int, Any] = dict(planes)
        if case.link.total > 0:
            used = {rank: SlowPlane(plane, lambda *_: case.link, SYSTEM_CLOCK) for rank, plane in planes.items()}
            for plane in used.values():
                undo.callback(plane.close)
        executors = [_executor(case, used[rank], rank, pieces) for rank in range(case.ranks)]

        def run(rank: int) -> tuple[float, float, int]:
            started = SYSTEM_CLOCK.monotonic()
            totals = executors[rank].run(sequence, case.actions(rank), batches, training=True)
            return started, SYSTEM_CLOCK.monotonic(), totals.in_flight

        found = on_all([lambda rank=rank: run(rank) for rank in range(case.ranks)])  # type: ignore[misc]
    return max(end for _, end, _ in found) - min(start for start, _, _ in found), [held for *_, held in found]


def _executor(case: Case, plane: Any, rank: int, pieces: Cut) -> PipelineExecutor:
    stages = len(case.seconds)
    runners: dict[int, Any] = {
        stage: SleepingRunner(
            StageRunner(pieces.programs[stage], pieces.weights(stage), split_backward=True), case.seconds[stage]
        )
        for stage in stages_of_rank(case.schedule, rank, ranks=case.ranks, stages=stages)
    }
    return PipelineExecutor(
        plane=plane, rank=rank, runners=runners, rank_of_stage=[case.place(stage) for stage in range(stages)],
        device=torch.device("cpu"), clock=SYSTEM_CLOCK, seed=0, replica=0,
    )  # fmt: skip
