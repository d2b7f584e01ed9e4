"""The promise, checked on the user's own model: the mesh against one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distensor.core.compute import Precision
from distensor.program import run_module
from distensor.training.results import Parity

if TYPE_CHECKING:
    from torch import Tensor, nn

ZERO_BUT_FOR_ROUNDING = 1e-4
"""A gradient smaller than this part of the largest one counts with that size. Some are zero but for rounding (the bias
of keys under softmax); a ratio of two roundings says nothing."""


def compare(
    module: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    mesh_loss: float,
    mesh_gradients: Mapping[str, Tensor],
    precision: Precision = Precision.FP32,
) -> Parity:
    """Run `batch` through a copy of `module` here, in the same precision, and compare with what the mesh computed."""
    reference = copy.deepcopy(module)
    reference.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16):
        value = run_module(reference, batch, loss)
    value.backward()  # type: ignore[no-untyped-call]
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in reference.named_parameters()
        if p.requires_grad
    }
    apart = {name: _norm(mesh_gradients.get(name, torch.zeros_like(g)) - g) for name, g in expected.items()}
    norms = {name: _norm(gradient) for name, gradient in expected.items()}
    floor = ZERO_BUT_FOR_ROUNDING * max(norms.values(), default=0.0)
    return Parity(
        loss=mesh_loss,
        reference_loss=float(value.detach()),
        loss_difference=relative_loss_difference(mesh_loss, float(value.detach())),
        gradient_difference=_ratio(math.hypot(*apart.values()), math.hypot(*norms.values())),
        gradient_differences={name: _ratio(apart[name], max(norms[name], floor)) for name in expected},
    )


def relative_difference(ours: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm of the reference."""
    return _ratio(_norm(ours.detach() - reference.detach()), _norm(reference.detach()))


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


def _ratio(difference: float, scale: float) -> float:
    """Infinite, never NaN, where one of the two is no number: NaN loses every comparison and would pass for equal."""
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale > 0 else math.inf
    return math.inf if math.isnan(ratio) else ratio


def relative_loss_difference(ours: float, reference: float) -> float:
    return _ratio(abs(ours - reference), abs(reference) or 1.0)
