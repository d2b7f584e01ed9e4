"""Decoupled momentum: the fast components of each worker's momentum travel, the rest stays (DeMo)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.update_bytes import CHUNK
from distensor.optim.distro.codec import Rows
from distensor.optim.distro.cosine import inverse, tiles_of, transform
from distensor.optim.distro.exchange import Exchange
from distensor.optim.distro.layout import Layout, make_layout
from distensor.optim.distro.protection import Scales
from distensor.optim.distro.selection import count_rows
from distensor.optim.distro.sparse import SparseOptimizer


class DeMo(SparseOptimizer):
    """DeMo (Peng, Quesnelle, Kingma: Decoupled Momentum Optimization, 2024), with values of one or two bits.

    Each worker adds `lr` times its gradient to a momentum that decays by `decay`, transforms the momentum by cosines in
    tiles of at most 64 x 64 (of the last two dims), sends the `k` largest coefficients of each chunk, and takes what it
    sent out of its momentum. All workers take, for each coefficient, the mean over those that sent it, transform back,
    and step by `lr` in the direction of the sign; weight decay as in AdamW.

    Args:
        lr, weight_decay: of the update.
        decay: of the momentum.
        k, chunk, value_bits, group, exchange, clip_messages: see `SparseOptimizer`.
        delay: apply what was exchanged one step later, so that computing hides the exchange.
        look_ahead: with `delay`, compute gradients where this worker's own pending update leads to.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        *,
        k: int = 32,
        chunk: int = CHUNK,
        value_bits: int = 1,
        delay: bool = False,
        look_ahead: bool = True,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
        clip_messages: float | None = 4.0,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "decay": decay, "weight_decay": weight_decay},
            k=k,
            chunk=chunk,
            value_bits=value_bits,
            delay=delay,
            look_ahead=look_ahead,
            group=group,
            exchange=exchange,
            clip_messages=clip_messages,
        )

    def _make_layout(self, k: int, chunk: int) -> Layout:
        self._tiles = [tiles_of(tuple(p.shape)) for p in self._tensors]
        return make_layout([(tiles.coefficients,) for tiles in self._tiles], k=k, chunk=chunk)

    def _accumulate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    momentum = self._residual_of(parameter).mul_(group["decay"])
                    if parameter.grad is not None:
                        momentum.add_(parameter.grad, alpha=group["lr"])

    def _pack(self, residuals: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(residuals, self._tiles, strict=True)
        return self._packing.pack([transform(residual, tiles) for residual, tiles in pairs])

    def _unpack(self, matrices: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        flat = [torch.empty(tiles.coefficients, device=self._device) for tiles in self._tiles]
        self._packing.unpack(matrices, flat)
        for tensor, coefficients, tiles in zip(into, flat, self._tiles, strict=True):
            tensor.copy_(inverse(coefficients, tiles))

    def _combine(self, updates: Sequence[list[Rows]], scales: Scales, late: int) -> list[Tensor]:
        del late  # only signs are applied
        sums = self._sum(updates, scales)
        for matrix, counts in zip(sums, self._counts(updates), strict=True):
            matrix.div_(counts.clamp_(min=1.0))
        return sums

    def _counts(self, updates: Sequence[list[Rows]]) -> list[Tensor]:
        counts = self._packing.zeros(self._device)
        for update in updates:
            for matrix, rows in zip(counts, update, strict=True):
                count_rows(matrix, rows)
        return counts

    def _update(self, mean: Sequence[Tensor]) -> None:
        for parameter, group, direction in self._with_groups(mean):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(direction.sign(), alpha=-group["lr"])


class DisTrO(DeMo):
    """DeMo as DisTrO runs it over the internet: one bit a value, one step late, with look-ahead.

    The exchange of a step happens while the next one computes. Between steps the weights of a worker differ from those
    of the others by its own pending update; `shared_weights` are what all have in common.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        decay: float = 0.999,
        weight_decay: float = 0.0,
        *,
        k: int = 32,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(params, lr, decay, weight_decay, k=k, chunk=chunk, delay=True, group=group, exchange=exchange)
