"""The promise, checked on the user's own model: the mesh against one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distensor.core.errors import ConfigError
from distensor.training.results import Parity

if TYPE_CHECKING:
    from torch import Tensor, nn


def loss_of(module: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """The loss of `batch` in this process, by the rules for batches that `Trainer` documents."""
    if isinstance(batch, Mapping):
        outputs = module(**batch)
    elif isinstance(batch, tuple | list):
        outputs = module(batch[0])
    else:
        outputs = module(batch)
    if loss is not None:
        return loss(outputs, batch)
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise ConfigError(f"the module returned {type(outputs).__name__} without a loss, and no loss=... was given")
    return found


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
    value = loss_of(reference, batch, loss)
    value.backward()  # type: ignore[no-untyped-call]
    expected = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    return Parity(
        loss=mesh_loss,
        reference_loss=float(value.detach()),
        loss_difference=_relative(mesh_loss, float(value.detach())),
        gradient_differences={
            name: relative_difference(mesh_gradients[name], torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in expected.items()
        },
    )


def relative_difference(ours: Tensor, reference: Tensor) -> float:
    """The largest absolute difference over the largest magnitude of the reference."""
    if reference.numel() == 0:
        return 0.0
    difference = float((ours.double() - reference.double()).abs().max())
    scale = float(reference.abs().max())
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


def _relative(ours: float, reference: float) -> float:
    return abs(ours - reference) / abs(reference) if reference else abs(ours - reference)
