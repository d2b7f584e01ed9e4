"""How contributions of ranks become one: always in rank order, so that every run and every rank gets the same bits.

Low-precision floats are added up in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from distensor.core.errors import ConfigError


class Reduction(StrEnum):
    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


_COMBINE: Mapping[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}


def reduce_into(out: Tensor, parts: Iterable[Tensor], op: Reduction) -> None:
    """Write the reduction of `parts` (one per rank, in rank order) into `out`, which may be one of them."""
    wide = _wide(out.dtype)
    total: Tensor | None = None
    count = 0
    for part in parts:
        count += 1
        total = part.to(wide) if total is None else _combine(total, part.to(wide), op, fresh=count > 2)
    if total is None:
        return
    if op is Reduction.AVG:
        total = total / count
    if total is not out:
        out.copy_(total)


def _combine(total: Tensor, part: Tensor, op: Reduction, *, fresh: bool) -> Tensor:
    """`fresh` tells that `total` is ours to write to; the first one still belongs to somebody."""
    if fresh and op in (Reduction.SUM, Reduction.AVG):
        return total.add_(part)
    return _COMBINE[op](total, part)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@cache
def check_reducible(dtype: torch.dtype, op: Reduction) -> None:
    """Raise ConfigError, before anything is sent, if tensors of this dtype have no such reduction."""
    if op is Reduction.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"reduce op avg of {dtype} is not defined; use sum, or a floating dtype")
    sample = torch.zeros(1, dtype=dtype)
    try:
        reduce_into(torch.zeros(1, dtype=dtype), [sample, sample], op)
    except RuntimeError as error:
        raise ConfigError(f"reduce op {op} of {dtype} is not defined: {error}") from error
