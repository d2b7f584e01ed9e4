"""Optimizers by name, learning-rate schedules, and what a worker does with gradients."""

from __future__ import annotations

from distensor.optim.build import build_optimizer, check_optimizer, make_spec, set_learning_rate
from distensor.optim.schedules import LrSchedule, parse_lr_schedule
from distensor.optim.spec import OptimizerSpec

__all__ = [
    "LrSchedule",
    "OptimizerSpec",
    "build_optimizer",
    "check_optimizer",
    "make_spec",
    "parse_lr_schedule",
    "set_learning_rate",
]
