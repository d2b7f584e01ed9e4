"""An exponential moving average of a model's parameters, on the local shards where they are DTensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from distensor.core.distributed.broadcasting import get_local_tensor_if_dtensor
from distensor.core.errors import ConfigError


class DTensorFastEmaModelUpdater:
    """target = beta * target + (1 - beta) * source, with one fused kernel per operation; buffers are left alone.

    `cache` and `restore` keep a model's own weights while it runs with the averaged ones.
    """

    def __init__(self) -> None:
        self._cached: list[Tensor] | None = None

    @property
    def is_cached(self) -> bool:
        return self._cached is not None

    @torch.no_grad()
    def copy_to(self, src_model: nn.Module, tgt_model: nn.Module) -> None:
        """Overwrite the target's parameters with the source's.

        Raises:
            ConfigError: the models differ in their parameters.
        """
        for source, target in _pairs(src_model, tgt_model):
            target.copy_(source)

    @torch.no_grad()
    def update_average(self, src_model: nn.Module, tgt_model: nn.Module, beta: float = 0.9999) -> None:
        """One step of the average, in place in `tgt_model`.

        Raises:
            ConfigError: a target that is not float32 (in bf16 and fp16 the term 1 - beta is rounded away), or models
                that differ in their parameters; nothing has been changed.
        """
        pairs = _pairs(src_model, tgt_model)
        for _, target in pairs:
            if target.dtype != torch.float32:
                raise ConfigError(f"EMA model only works in FP32 dtype, got {target.dtype}.")
        if not pairs:
            return
        targets = [target for _, target in pairs]
        torch._foreach_mul_(targets, beta)
        torch._foreach_add_(targets, [source for source, _ in pairs], alpha=1.0 - beta)

    @torch.no_grad()
    def cache(self, parameters: Iterable[Tensor], is_cpu: bool = False) -> None:
        """Keep a copy of `parameters`, on the CPU if `is_cpu`, until `restore`.

        Raises:
            ConfigError: there is a copy already.
        """
        if self._cached is not None:
            raise ConfigError("EMA cache is already taken. Did you forget to restore it?")
        copies = [get_local_tensor_if_dtensor(parameter).clone() for parameter in parameters]
        self._cached = [copy.cpu() if is_cpu else copy for copy in copies]

    @torch.no_grad()
    def restore(self, parameters: Iterable[Tensor]) -> None:
        """Write the copy back and forget it.

        Raises:
            ConfigError: there is no copy, or `parameters` are not as many as were cached.
        """
        if self._cached is None:
            raise ConfigError("EMA cache is not taken yet.")
        targets = [get_local_tensor_if_dtensor(parameter) for parameter in parameters]
        if len(targets) != len(self._cached):
            raise ConfigError(f"restore: {len(targets)} parameters, but {len(self._cached)} are cached")
        for target, copy in zip(targets, self._cached, strict=True):
            target.copy_(copy)
        self._cached = None


def _pairs(source: nn.Module, target: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The parameters of both, in order: (source, target)."""
    sources, targets = _locals(source), _locals(target)
    if len(sources) != len(targets):
        raise ConfigError(f"the source has {len(sources)} parameters and the target {len(targets)}; expected as many")
    for (name, left), (other, right) in zip(sources.items(), targets.items(), strict=True):
        if left.shape != right.shape:
            raise ConfigError(
                f"parameter {name!r} of the source has shape {tuple(left.shape)} and {other!r} of the target "
                f"{tuple(right.shape)}; expected the same"
            )
    return list(zip(sources.values(), targets.values(), strict=True))


def _locals(model: nn.Module) -> dict[str, Tensor]:
    return {name: get_local_tensor_if_dtensor(parameter).detach() for name, parameter in model.named_parameters()}
