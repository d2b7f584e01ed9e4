"""What everything else is made of: configuration, ids, errors, time. Imports nothing heavy."""

from __future__ import annotations

from distensor.core.clock import SYSTEM_CLOCK, Clock, SystemClock
from distensor.core.ids import DRIVER_RANK, DeviceId, Epoch, Generation, JobId, NodeId, Rank, WorkerId
from distensor.core.parallel import Axis, Coordinates, ParallelConfig, RankLayout
from distensor.core.reading import Reading, Unavailable, value_or

__all__ = [
    "DRIVER_RANK",
    "SYSTEM_CLOCK",
    "Axis",
    "Clock",
    "Coordinates",
    "DeviceId",
    "Epoch",
    "Generation",
    "JobId",
    "NodeId",
    "ParallelConfig",
    "Rank",
    "RankLayout",
    "Reading",
    "SystemClock",
    "Unavailable",
    "WorkerId",
    "value_or",
]
