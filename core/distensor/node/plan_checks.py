"""Whether what the driver wants loaded can be this rank's at all; before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distensor.core import Rank, RankLayout
from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.core.schedules import Action, actions_of_rank, check_schedule, stages_of_rank
from distensor.sync import Sync

if TYPE_CHECKING:
    from distensor.node.orders import JobPlan
    from distensor.program import StageRunner


def check_stages(plan: JobPlan, programs: Mapping[int, bytes], layout: RankLayout, rank: Rank) -> None:
    """Before anything is as long as the number of stages that somebody else wrote down.

    Raises:
        ProgramRejectedError: stages that are not those of `rank`.
    """
    ranks, place = layout.config.pipeline_parallel, layout.coordinates(rank).pp
    try:
        check_schedule(plan.schedule, ranks=ranks, stages=plan.stages)
    except ConfigError as error:
        raise ProgramRejectedError(str(error)) from error
    count = plan.stages // ranks
    fits = len(programs) == count
    expected = stages_of_rank(plan.schedule, place, ranks=ranks, stages=plan.stages) if fits else ()
    if sorted(programs) != list(expected):
        raise ProgramRejectedError(
            f"rank {rank} was given stages {sorted(programs)[:10]}; expected the {count} of {plan.stages} "
            f"that pipeline rank {place} of {ranks} holds"
        )


def check_tied(plan: JobPlan, runners: Mapping[int, StageRunner]) -> None:
    """A tied weight is held by stages that exist, and the copies that are here look alike.

    Raises:
        ProgramRejectedError: they are not.
    """
    for tied in plan.tied:
        kinds = set()
        for stage, name in tied.holders:
            runner = runners.get(stage)
            if not 0 <= stage < plan.stages or (runner is not None and name not in runner.parameters):
                raise ProgramRejectedError(f"tied weight {name[:100]!r}: stage {stage} holds no such parameter")
            if runner is not None:
                parameter = runner.parameters[name]
                kinds.add((parameter.shape, parameter.dtype, parameter.requires_grad))
        if len(kinds) > 1:
            raise ProgramRejectedError(f"tied weight {tied.holders[:4]}: its copies differ in shape or dtype")


def check_slices(plan: JobPlan) -> None:
    """An optimizer that needs whole weights meets none that are cut.

    Raises:
        ProgramRejectedError: it would.
    """
    try:
        if plan.sync is Sync.ZERO3:
            plan.optimizer.require_elementwise("sync='zero3'")
        if plan.sharded:
            plan.optimizer.require_elementwise("weights cut by tensor parallelism")
    except ConfigError as error:
        raise ProgramRejectedError(str(error)) from error


def actions_of(
    plan: JobPlan, layout: RankLayout, place: int, micro_batches: int, warm_up: Sequence[int] | None
) -> tuple[Action, ...]:
    """What the rank at `place` of its pipeline does in a step.

    Raises:
        ProgramRejectedError: a warm-up that the schedule does not take.
    """
    try:
        return actions_of_rank(
            plan.schedule,
            rank=place,
            ranks=layout.config.pipeline_parallel,
            stages=plan.stages,
            micro_batches=micro_batches,
            warm_up=warm_up,
        )
    except ConfigError as error:
        raise ProgramRejectedError(str(error)) from error
