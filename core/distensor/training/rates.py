"""The learning rate of each optimizer step, whatever the schedule is given as."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from distensor.core.errors import ConfigError
from distensor.optim import LrSchedule
from distensor.optim.spec import check_learning_rate

Schedule: TypeAlias = LrSchedule | Callable[[int], float] | None


def resolved_schedule(schedule: Schedule, steps_done: int, total: int | None) -> Schedule:
    """A schedule without a number of steps takes that of its first `fit`, which takes `total` steps.

    Raises:
        ConfigError: it needs the number, and nobody knows it.
    """
    if not isinstance(schedule, LrSchedule) or not schedule.needs_total:
        return schedule
    if total is None:
        wanted = "set its total_steps or fit(max_steps=)"
        raise ConfigError(f"lr_schedule {schedule.curve.value!r}: the data has no length; {wanted}")
    return schedule.with_total(steps_done + total)


def rate_of(schedule: Schedule, lr: float, step: int) -> float:
    """The rate of optimizer step `step` (1, 2, ...). Raises ConfigError for one that is no rate."""
    if isinstance(schedule, LrSchedule):
        return schedule.rate(step, check_learning_rate(lr))
    return check_learning_rate(lr if schedule is None else schedule(step))
