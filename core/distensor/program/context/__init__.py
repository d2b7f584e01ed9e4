"""Context parallelism: a captured graph rewritten so that each rank computes its chunks of the sequence."""

from __future__ import annotations

from distensor.program.context.rewriting import ContextCut, cut_sequence

__all__ = ["ContextCut", "cut_sequence"]
