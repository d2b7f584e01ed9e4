"""How replicas agree: whole weights with summed gradients, or weights cut over the group. Loads torch."""

from __future__ import annotations

from distensor.sync.gradients import GradientReducer
from distensor.sync.stores import Held, ReplicatedWeights, Stages, Sync, WeightStore, keyed
from distensor.sync.zero3 import ShardedWeights

__all__ = ["GradientReducer", "Held", "ReplicatedWeights", "ShardedWeights", "Stages", "Sync", "WeightStore", "keyed"]
