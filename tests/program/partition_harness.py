"""Runs a partitioned module with its ranks as threads, and puts the gradients together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from program_harness import Result
from program_harness import _run_part as run_rank
from torch import Tensor

from distensor.core.parallel import Axis
from distensor.nn import Shard, ShardingSpec
from distensor.program import Captured, Cut, Partition, StageProgram, StageRunner, cut, partition
from distensor.program.axes import AxisGroup
from distensor.testing.axes import Grid


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the ranks computed, put together, and the collectives that they called."""

    result: Result
    calls: Sequence[str]
    per_rank: Sequence[Mapping[str, Tensor]] = field(default=())


def dims_of(captured: Captured, spec: Mapping[str, Any]) -> dict[str, int | None]:
    """The declaration that users write, as partition takes it."""
    shapes = {name: spec.shape for name, spec in captured.parameters.items()}
    resolved = ShardingSpec(spec).resolve(shapes)
    return {name: rule.dim if isinstance(rule, Shard) else None for name, rule in resolved.items()}


def divided(captured: Captured, spec: Mapping[str, Any], ranks: int) -> Partition:
    return partition(captured, dims_of(captured, spec), tensor=ranks)


def run_ranks(
    made: Partition, batch: Any, stages: Mapping[str, int] | None = None, *, seed: int = 0, foreign: bool = True
) -> Ranks:
    """Forward and backward of one batch on all tp ranks. `foreign`: through JSON, as workers get their programs."""
    cuts = [cut(made.captured(tp=rank), stages) for rank in range(made.tensor)]
    grid = Grid({Axis.TP: made.tensor}, timeout=60)

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> tuple[float, float, dict[str, Tensor]]:
        torch.set_num_threads(1)
        pieces = cuts[place[Axis.TP]]
        return run_rank(_runners(pieces, groups, foreign), pieces.flatten_batch(batch), seed)

    found = grid.run(run)
    (meeting,) = grid.meetings.values()
    assert len({(loss, weight) for loss, weight, _ in found}) == 1, "the ranks disagree about loss or weight"
    gradients = [gradient for _, _, gradient in found]
    return Ranks(
        result=Result(loss=found[0][0], gradients=_joined(made, gradients)), calls=meeting.calls, per_rank=gradients
    )


def _runners(pieces: Cut, groups: Mapping[Axis, AxisGroup], foreign: bool) -> list[StageRunner]:
    programs = [StageProgram.from_json(program.to_json()) if foreign else program for program in pieces.programs]
    return [StageRunner(program, pieces.weights(program.stage), axes=groups) for program in programs]


def _joined(made: Partition, ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole gradients: cut ones joined, all others the same on every rank."""
    whole: dict[str, Tensor] = {}
    for name, first in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        layout = made.layouts.get(name)
        if layout is None:
            assert all(torch.allclose(part, first, rtol=1e-5, atol=1e-7) for part in parts), name
        whole[name] = first if layout is None else layout.join(parts)
    return whole
