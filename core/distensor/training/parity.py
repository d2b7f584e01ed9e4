"""The promise, checked on the user's own model: the mesh against one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distensor.program import run_module
from distensor.training.results import Parity

if TYPE_CHECKING:
    from torch import Tensor, nn


def compare(
    module: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    mesh_loss: float,
    mesh_gradients: Mapping[str, Tensor],
) -> Parity:
    """Run `batch` through a copy of `module` here, and compare with what the mesh computed."""
    reference = copy.deepcopy(module)
    reference.zero_grad(set_to_none=True)
    value = run_module(reference, batch, loss)
    value.backward()  # type: ignore[no-untyped-call]
    expected = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    return Parity(
        loss=mesh_loss,
        reference_loss=float(value.detach()),
        loss_difference=_relative(mesh_loss, float(value.detach())),
        gradient_differences={
            name: relative_difference(mesh_gradients.get(name, zeros), zeros if p.grad is None else p.grad)
            for name, p in expected.items()
            for zeros in (torch.zeros_like(p),)
        },
    )


def relative_difference(ours: Tensor, reference: Tensor) -> float:
    """The largest absolute difference over the largest magnitude of the reference."""
    if reference.numel() == 0:
        return 0.0
    difference = float((ours.detach().double() - reference.detach().double()).abs().max())
    scale = float(reference.detach().abs().max())
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


def _relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / abs(reference) if reference else abs(ours - reference)
