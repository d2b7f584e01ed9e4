"""How replicas agree: gradient averaging. Loads torch."""

from __future__ import annotations

from distensor.sync.gradients import GradientReducer

__all__ = ["GradientReducer"]
