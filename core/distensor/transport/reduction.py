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


_COMBINE: Mapping[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}


def reduce_into(out: Tensor, parts: Iterable[Tensor], op: Reduction, count: int) -> None:
    """Write the reduction of `parts` (`count` of them, in rank order) into `out`, which may be one of them."""
    wide = _wide(out.dtype)
    ordered = iter(parts)
    if count == 1:
        out.copy_(next(ordered))
    elif count == 2 and wide is out.dtype:
        _COMBINE[op](next(ordered), next(ordered), out=out)
        if op is Reduction.AVG:
            out.div_(count)
    else:
        total = _fold(ordered, wide, op)
        out.copy_(total.div_(count) if op is Reduction.AVG else total)


def _fold(parts: Iterable[Tensor], wide: torch.dtype, op: Reduction) -> Tensor:
    """In memory of its own: `out` may be a part that is still to come."""
    ordered = iter(parts)
    combine = _COMBINE[op]
    total = combine(next(ordered).to(wide), next(ordered).to(wide))
    for part in ordered:
        combine(total, part.to(wide), out=total)
    return total


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@cache
def check_reducible(dtype: torch.dtype, op: Reduction) -> None:
    """Raise ConfigError, before anything is sent, if tensors of this dtype have no such reduction."""
    if op is Reduction.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"reduce op avg of {dtype} is not defined; use sum, or a floating dtype")
    sample = torch.zeros(1, dtype=dtype)
    try:
        reduce_into(torch.zeros(1, dtype=dtype), [sample, sample], op, 2)
    except RuntimeError as error:
        raise ConfigError(f"reduce op {op} of {dtype} is not defined: {error}") from error
