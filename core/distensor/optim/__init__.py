"""Optimizers by name, and what a worker needs to build one."""

from __future__ import annotations

from distensor.optim.build import OptimizerSpec, build_optimizer, check_optimizer, set_learning_rate

__all__ = ["OptimizerSpec", "build_optimizer", "check_optimizer", "set_learning_rate"]
