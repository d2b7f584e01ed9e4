"""StageProgram: capture a module, cut it into stages, check foreign programs, run them.

Names are resolved on first use: the data and the JSON need no torch, capture and the runner do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distensor.program.batch import run_module
    from distensor.program.capturing import Captured, capture
    from distensor.program.cutting import Cut, TiedGroup, cut
    from distensor.program.deferral import WeightGradients
    from distensor.program.partitioning import Partition, partition
    from distensor.program.runner import StageRunner
    from distensor.program.shapes import Cost, check_shapes
    from distensor.program.stage_program import StageProgram
    from distensor.program.values import DType, Limits, Source

_HOME = {
    "Captured": "capturing",
    "Cost": "shapes",
    "Cut": "cutting",
    "DType": "values",
    "Limits": "values",
    "Partition": "partitioning",
    "Source": "values",
    "StageProgram": "stage_program",
    "StageRunner": "runner",
    "TiedGroup": "cutting",
    "WeightGradients": "deferral",
    "capture": "capturing",
    "check_shapes": "shapes",
    "cut": "cutting",
    "partition": "partitioning",
    "run_module": "batch",
}

__all__ = [
    "Captured",
    "Cost",
    "Cut",
    "DType",
    "Limits",
    "Partition",
    "Source",
    "StageProgram",
    "StageRunner",
    "TiedGroup",
    "WeightGradients",
    "capture",
    "check_shapes",
    "cut",
    "partition",
    "run_module",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'distensor.program' has no attribute {name!r}")
    return getattr(importlib.import_module(f"distensor.program.{home}"), name)
