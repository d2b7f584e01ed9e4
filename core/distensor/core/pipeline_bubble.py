"""The part of a step in which ranks wait for each other, predicted before the first step has run."""

from __future__ import annotations

from distensor.core.pipeline_simulation import StageSeconds, simulate
from distensor.core.schedules import Schedule, actions_of_rank, rank_of_stage

EQUAL = StageSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
"""The usual proportion: a backward is two products for each of the forward."""


def predicted_bubble(schedule: Schedule, *, ranks: int, stages: int, micro_batches: int) -> float:
    """Between 0 and 1, for equal stages and links that take no time.

    GPipe and 1F1B with one stage a rank: (P - 1) / (M + P - 1).

    Raises:
        ConfigError: sizes that the schedule cannot have.
    """
    lists = [
        actions_of_rank(schedule, rank=rank, ranks=ranks, stages=stages, micro_batches=micro_batches)
        for rank in range(ranks)
    ]
    place = {stage: rank_of_stage(schedule, stage, ranks=ranks) for stage in range(stages)}
    return simulate(lists, seconds=[EQUAL] * stages, place=place.__getitem__).mean_idle
