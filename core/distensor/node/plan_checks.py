"""What a rank refuses of a plan that somebody else wrote, beyond what can be read off it alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.sync import Sync

if TYPE_CHECKING:
    from distensor.node.orders import JobPlan
    from distensor.program import StageRunner


def check_tied(plan: JobPlan, runners: Mapping[int, StageRunner]) -> None:
    """A tied weight is held by stages that exist, and the copies that are here look alike.

    Raises:
        ProgramRejectedError: it is not.
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
