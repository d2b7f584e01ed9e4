"""What a checkpoint says of the run besides tensors, and what of it a resumed run takes over."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from distensor import __version__
from distensor.core.errors import CheckpointError, ConfigError
from distensor.optim import LrSchedule

if TYPE_CHECKING:
    from distensor.optim import OptimizerSpec
    from distensor.training.checkpoint_folder import Saved
    from distensor.training.options import TrainerOptions

logger = logging.getLogger(__name__)

FREE = frozenset({"lr", "first_lr", "distensor", "parallel", "stages", "micro_batches", "schedule"})
"""Settings that may differ without a word: they change no number, or are taken over."""


def run_settings(
    options: TrainerOptions, optimizer: OptimizerSpec, lr: float, schedule: LrSchedule | Callable[[int], float] | None
) -> dict[str, Any]:
    """What a checkpoint keeps of the run, as JSON gives it back. A function as schedule cannot be kept; that it was one
    is."""
    settings = {
        "distensor": __version__,
        "parallel": options.parallel.describe(),
        "stages": options.stages,
        "schedule": options.schedule.value,
        "micro_batches": options.micro_batches,
        "accumulate": options.accumulate,
        "clip_norm": options.clip_norm,
        "norm_type": options.norm_type.value,
        "precision": options.precision.value,
        "seed": options.seed,
        "first_lr": optimizer.lr,
        "lr": lr,
        "optimizer": {key: value for key, value in optimizer.to_json().items() if key != "lr"},
        "lr_schedule": schedule.to_json() if isinstance(schedule, LrSchedule) else schedule and "a function",
    }
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def resumed_schedule(saved: Mapping[str, Any], own: Any) -> Any:
    """`own`, with the number of steps that its first `fit` had found out if it was the same schedule then.

    Raises:
        CheckpointError: what was saved is no schedule.
    """
    found = saved.get("lr_schedule")
    if not isinstance(own, LrSchedule) or not own.needs_total or not isinstance(found, Mapping):
        return own
    try:
        known = LrSchedule.from_json(found)
    except ConfigError as error:
        raise CheckpointError(f"the checkpoint's learning-rate schedule: {error}") from error
    return known if replace(known, total_steps=None) == own else own


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A checkpoint whose weights are in the module, and what the trainer goes on with."""

    saved: Saved
    lr: float
    schedule: LrSchedule | Callable[[int], float] | None

    @property
    def step(self) -> int:
        return self.saved.manifest.step


def warn_of_changes(resumed: Resumed, own: Mapping[str, Any]) -> list[str]:
    """One line for each setting that changes what the next steps compute; logged, since it may be meant."""
    saved = resumed.saved.manifest.run
    lines = [
        f"{key} is {own.get(key)!r} now and was {saved.get(key)!r}"
        for key in sorted((saved.keys() | own.keys()) - FREE)
        if saved.get(key) != own.get(key)
    ]
    if lines:
        logger.warning("the run goes on with other settings than the checkpoint's: %s", "; ".join(lines))
    return lines


def check_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError with all in which the running job was told other settings than this script has."""
    differ = [key for key in sorted((saved.keys() | own.keys()) - FREE) if saved and saved.get(key) != own.get(key)]
    changed = [key for key in differ if key != "lr_schedule"]
    if changed:
        lines = "; ".join(f"{key} is {own.get(key)!r} here and {saved.get(key)!r} there" for key in changed)
        raise ConfigError(f"the job cannot be taken over: {lines}. Start the same script again, or end the job")


def resumed_lr(saved: Mapping[str, Any], first_lr: float) -> float:
    """The learning rate to go on with.

    One that was assigned during the run comes back, unless the script has another `lr` now than it had then.
    """
    first, last = saved.get("first_lr"), saved.get("lr")
    for rate in (first, last):
        if not isinstance(rate, float | int) or isinstance(rate, bool) or not 0 <= rate < math.inf:
            raise CheckpointError(f"the checkpoint's learning rate is {rate!r}; expected a finite number of at least 0")
    return float(cast("float", last)) if first == first_lr else first_lr
