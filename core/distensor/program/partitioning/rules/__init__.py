"""What each operation makes of cut values: one small function per family of operations."""

from __future__ import annotations

from collections.abc import Mapping

from distensor.program.partitioning.rules import (
    attention,
    convolutions,
    elementwise,
    indexing,
    losses,
    norms,
    products,
    reductions,
    shapes,
)
from distensor.program.partitioning.rules.base import Rule

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **products.RULES,
    **convolutions.RULES,
    **shapes.RULES,
    **indexing.RULES,
    **reductions.RULES,
    **norms.RULES,
    **attention.RULES,
    **losses.RULES,
}
"""Operations not named here get whole values and give whole values."""
