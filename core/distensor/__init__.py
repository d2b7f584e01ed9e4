"""disTensor: train one PyTorch model across machines that belong to different people.

Names are resolved on first use (PEP 562), so `import distensor` loads neither torch nor grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distensor.core import ParallelConfig
    from distensor.nn import DistributedModel, Replicate, Shard, ShardingSpec, StageMapping
    from distensor.training import (
        History,
        Plan,
        StepResult,
        Trainer,
        init,
        plan,
        query_mesh,
        session,
        shutdown,
    )

__version__ = "0.1.0"

_HOME = {
    "ParallelConfig": "distensor.core",
    "DistributedModel": "distensor.nn",
    "Replicate": "distensor.nn",
    "Shard": "distensor.nn",
    "ShardingSpec": "distensor.nn",
    "StageMapping": "distensor.nn",
    "History": "distensor.training",
    "Plan": "distensor.training",
    "plan": "distensor.training",
    "StepResult": "distensor.training",
    "Trainer": "distensor.training",
    "init": "distensor.training",
    "query_mesh": "distensor.training",
    "session": "distensor.training",
    "shutdown": "distensor.training",
}

__all__ = [
    "DistributedModel",
    "History",
    "ParallelConfig",
    "Plan",
    "Replicate",
    "Shard",
    "ShardingSpec",
    "StageMapping",
    "StepResult",
    "Trainer",
    "__version__",
    "init",
    "plan",
    "query_mesh",
    "session",
    "shutdown",
]


# `ds.nn.suggest_sharding(...)` works without importing the package by its full name first.
_PACKAGES = ("nn",)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"distensor.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'distensor' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
