"""What the user declares: how a module is cut. Importable without torch."""

from __future__ import annotations

from distensor.nn.mapping import StageMapping
from distensor.nn.model import DistributedModel
from distensor.nn.sharding import Placement, Replicate, Shard, ShardingSpec
from distensor.nn.suggestion import suggest_sharding

__all__ = [
    "DistributedModel",
    "Placement",
    "Replicate",
    "Shard",
    "ShardingSpec",
    "StageMapping",
    "suggest_sharding",
]
