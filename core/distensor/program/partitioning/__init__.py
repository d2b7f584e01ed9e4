"""One captured graph rewritten for every coordinate of tensor and context parallelism."""

from __future__ import annotations

from distensor.program.partitioning.parts import Partition, partition

__all__ = ["Partition", "partition"]
