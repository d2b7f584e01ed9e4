"""DisTrO-AdamW: AdamW's preconditioner, error feedback and 1-bit top-k instead of an all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.update_bytes import CHUNK
from distensor.optim.distro.exchange import Exchange
from distensor.optim.distro.sparse import SparseOptimizer


class DisTrOAdamW(SparseOptimizer):
    """A drop-in for AdamW without the gradient all-reduce: each worker steps on its own gradients.

    Each worker divides its gradient by the root of its own second moment (Adam's, bias-corrected), adds the result to a
    residual, and sends the `k` largest entries of each chunk as signs with one magnitude; what it sent leaves the
    residual. All workers subtract `lr` times the mean of what everybody sent, and decay the weights as AdamW does.
    There is no first moment: the residual remembers.

    Error feedback after Karimireddy et al., 2019; top-k with local state after DeMo (Peng, Quesnelle, Kingma, 2024).

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW; the first beta is not used.
        k, chunk: entries of each chunk of elements that travel.
        value_bits, delay, look_ahead, group, exchange, clip_messages: see `SparseOptimizer`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults,
            k=k,
            chunk=chunk,
            value_bits=value_bits,
            delay=delay,
            look_ahead=look_ahead,
            group=group,
            exchange=exchange,
            clip_messages=clip_messages,
        )

    def _accumulate(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._accumulate_one(parameter, group)

    def _accumulate_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        residual, state = self._residual_of(parameter), self.state[parameter]
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(residual)
            state["step"] = torch.tensor(0.0)
        if parameter.grad is None:
            return
        beta = group["betas"][1]
        gradient = parameter.grad.to(torch.float32)
        state["step"] += 1
        state["exp_avg_sq"].mul_(beta).addcmul_(gradient, gradient, value=1.0 - beta)
        correction = 1.0 - beta ** state["step"].item()
        root = (state["exp_avg_sq"] / correction).sqrt_().add_(group["eps"])
        residual.add_(gradient / root)

    def _update(self, mean: Sequence[Tensor]) -> None:
        for parameter, group, direction in self._with_groups(mean):
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            parameter.add_(direction, alpha=-group["lr"])
