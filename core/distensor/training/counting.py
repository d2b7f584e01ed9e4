"""What a forward pass costs, counted on the meta device: nothing is computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.utils.flop_counter import FlopCounterMode

from distensor.program.shapes import Cost, check_shapes
from distensor.program.values import Limits

if TYPE_CHECKING:
    from distensor.program import StageProgram

NO_LIMITS = Limits(max_bytes=1 << 62, max_work=math.inf)
"""What is counted is the user's own model: it is measured, not refused."""
ROWS = "batch"
"""How capture names the dim of the rows."""
STEP_OVER_FORWARD = 3
"""The backward pass of a matrix product is two products of the same size."""


def count(program: StageProgram, rows: int) -> tuple[int, Cost]:
    """(floating-point operations, cost) of a forward pass over so many rows, other dims as captured.

    The operations are those of matrix products, convolutions and attention, a multiply-add counted as two.
    """
    dims = {dim.name: rows if dim.name == ROWS else dim.example for dim in program.dims}
    with FlopCounterMode(display=False) as counter:
        cost = check_shapes(program, NO_LIMITS, dims)
    return counter.get_total_flops(), cost
