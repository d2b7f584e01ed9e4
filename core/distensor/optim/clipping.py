"""The norm of a whole model's gradient, and clipping by it.

A rank computes the part of its own gradients (`partial_norm`); parts add up, or, for the maximum norm, the largest
counts. What is combined is the p-th power: roots do not add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from distensor.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class NormType(StrEnum):
    """Which norm: the sum of magnitudes, the root of the sum of squares, or the largest magnitude."""

    ONE = "1"
    TWO = "2"
    INF = "inf"


_ROW = 1024
"""Elements whose squares are added in float32, some dozens to a lane; rows are added in double precision."""
_SHORT = 1 << 14
"""Weights of up to so many elements are added in double precision as they are: single calls would cost more."""
_SAFE = (1e-24, 1e30)
"""Between these no square of an element that matters was lost below, or beyond, what float32 holds."""

_BY_NUMBER = {1.0: NormType.ONE, 2.0: NormType.TWO, math.inf: NormType.INF}


def parse_norm_type(value: object) -> NormType:
    """1, 2 or math.inf as a number, or "inf".

    Raises:
        ConfigError: anything else.
    """
    found = None
    if value == "inf":
        found = NormType.INF
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = _BY_NUMBER.get(float(value))
    if found is None:
        raise ConfigError(f"norm_type={value!r}: expected 1.0, 2.0 or 'inf'")
    return found


def partial_norm(gradients: Iterable[Tensor], kind: NormType) -> float:
    """Sum of |g| or of g^2, or the largest |g|; 0.0 for no gradient at all.

    Sums are exact to about 1e-8: long ones are taken in double precision over short rows.
    """
    some = [gradient.detach() for gradient in gradients if gradient.numel()]
    if kind is NormType.TWO:
        quick = _squares(some)
        if _SAFE[0] < quick < _SAFE[1]:
            return quick
    parts = [_partial(gradient, kind) for gradient in some]
    if kind is not NormType.INF:
        return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
    return math.nan if any(map(math.isnan, parts)) else max(parts, default=0.0)


def _squares(gradients: Sequence[Tensor]) -> float:
    """The sum of all squares, with one wait for the device."""
    short: list[Tensor] = []
    sums: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.reshape(-1)
        whole = flat.numel() // _ROW * _ROW if flat.numel() > _SHORT and flat.dtype is torch.float32 else 0
        if whole:
            rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).to(wide(flat))
            sums.append(torch.dot(rows, rows))
        if whole < flat.numel():
            short.append(flat[whole:])
    if short:
        sums += [norm.square() for norm in torch._foreach_norm(short, 2, wide(short[0]))]
    return math.fsum(torch.stack([each.to(sums[0]) for each in sums]).tolist()) if sums else 0.0


def wide(tensor: Tensor) -> torch.dtype:
    """In which type sums are taken: double precision, which Metal has not."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _partial(gradient: Tensor, kind: NormType) -> float:
    match kind:
        case NormType.ONE:
            return float(gradient.to(wide(gradient)).abs().sum())
        case NormType.TWO:
            return float(torch.linalg.vector_norm(gradient, dtype=wide(gradient))) ** 2
        case NormType.INF:
            return float(gradient.abs().max())


def whole_norm(combined: float, kind: NormType) -> float:
    """The norm, from the combined parts of all ranks."""
    return math.sqrt(combined) if kind is NormType.TWO else combined


def clip_factor(norm: float, limit: float | None) -> float:
    """What the gradients are multiplied with; as torch.nn.utils.clip_grad_norm_ has it."""
    return 1.0 if limit is None or norm <= limit else limit / (norm + 1e-6)
