"""Workers that train on their own for many steps and exchange what came of it: DiLoCo and SparseLoCo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.errors import ConfigError
from distensor.core.update_bytes import CHUNK
from distensor.optim.distro.exchange import Exchange, exchange_of
from distensor.optim.distro.sparse import SparseOptimizer


class DiLoCo(torch.optim.AdamW):
    """DiLoCo (Douillard et al., 2023): AdamW on each worker; every `every` steps Nesterov momentum on the mean change.

    Args:
        lr, betas, eps, weight_decay: of the inner AdamW.
        every: inner steps between two exchanges.
        outer_lr, outer_momentum: of the outer step.
        group, exchange: the workers.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._every = _checked(every)
        self._outer_lr, self._outer_momentum = outer_lr, outer_momentum
        self._tensors = [p for group_ in self.param_groups for p in group_["params"] if p.requires_grad]
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self._exchange = exchange or exchange_of(group, device)
        self._inner_steps = 0
        self.bytes_sent = 0
        """Of values, as a ring all-reduce moves them: 2 (size - 1) / size of four bytes each."""
        self._anchors = [p.detach().to(torch.float32).clone() for p in self._tensors]
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step, and the outer one when it is time. All workers call it equally often."""
        loss: float | None = super().step(closure)
        self._inner_steps += 1
        if self._inner_steps % self._every == 0:
            self._outer_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """AdamW's, and `outer`: the common weights, their momentum and the number of inner steps."""
        outer = {"anchors": self._anchors, "momenta": self._momenta, "inner_steps": self._inner_steps}
        return {**super().state_dict(), "outer": outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "outer"})
        outer = state_dict["outer"]
        self._inner_steps = outer["inner_steps"]
        _copy_all(self._anchors, outer["anchors"])
        _copy_all(self._momenta, outer["momenta"])

    @torch.no_grad()
    def _outer_step(self) -> None:
        changes = [anchor - p.to(torch.float32) for p, anchor in zip(self._tensors, self._anchors, strict=True)]
        flat = torch.cat([change.reshape(-1) for change in changes])
        self._exchange.mean(flat)
        self.bytes_sent += 2 * (self._exchange.size - 1) * flat.numel() * 4 // self._exchange.size
        self.apply_mean(flat)

    @torch.no_grad()
    def apply_mean(self, flat: Tensor) -> None:
        """The outer step for the mean over all workers of (anchor - weights), flat, in the order of the parameters."""
        parts = torch.split(flat, [p.numel() for p in self._tensors])
        for p, anchor, momentum, part in zip(self._tensors, self._anchors, self._momenta, parts, strict=True):
            change = part.view(p.shape)
            momentum.mul_(self._outer_momentum).add_(change)
            anchor.sub_(change + self._outer_momentum * momentum, alpha=self._outer_lr)
            p.copy_(anchor)


class SparseLoCo(SparseOptimizer):
    """SparseLoCo (Sarfi et al., 2025): as DiLoCo, the change compressed under error feedback, without momentum.

    Every `every` steps: residual = `feedback` * residual + (anchor - weights); the `k` largest entries of each chunk
    travel with two bits each; all workers move the anchor by `outer_lr` times the mean and go on from there.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        every: int = 30,
        outer_lr: float = 1.0,
        feedback: float = 0.95,
        k: int = 64,
        chunk: int = CHUNK,
        value_bits: int = 2,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            k=k,
            chunk=chunk,
            value_bits=value_bits,
            delay=False,
            look_ahead=False,
            group=group,
            exchange=exchange,
        )
        self._every = _checked(every)
        self._outer_lr, self._feedback = outer_lr, feedback
        self._inner = torch.optim.AdamW(self.param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._inner_steps = 0
        self._anchors = [p.detach().to(torch.float32).clone() for p in self._tensors]

    def inner_step(self) -> bool:
        """One step of AdamW with the present learning rates; whether it is time to exchange."""
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = own["lr"]
        self._inner.step()
        self._inner_steps += 1
        return self._inner_steps % self._every == 0

    def _advance(self) -> None:
        if self.inner_step():
            self._exchange_and_apply(self.propose())

    def _sources(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def _forget(self) -> None:
        self._inner.state.clear()

    def _accumulate(self) -> None:
        for parameter, anchor in zip(self._tensors, self._anchors, strict=True):
            change = anchor - parameter.to(torch.float32)
            self._residual_of(parameter).mul_(self._feedback).add_(change)

    def _update(self, mean: Sequence[Tensor]) -> None:
        for parameter, anchor, direction in zip(self._tensors, self._anchors, mean, strict=True):
            anchor.sub_(direction, alpha=self._outer_lr)
            self._target(parameter).copy_(anchor)
            parameter.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        """The residuals, and `inner`: AdamW's state, the common weights and the number of inner steps."""
        inner = {"adamw": self._inner.state_dict(), "anchors": self._anchors, "inner_steps": self._inner_steps}
        return {**super().state_dict(), "inner": inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` returned."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "inner"})
        inner = state_dict["inner"]
        self._inner.load_state_dict(inner["adamw"])
        self._inner_steps = inner["inner_steps"]
        _copy_all(self._anchors, inner["anchors"])


@torch.no_grad()
def _copy_all(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for target, source in zip(into, of, strict=True):
        target.copy_(source)


def _checked(every: int) -> int:
    if every < 1:
        raise ConfigError(f"every = {every}; expected at least 1 inner step between two exchanges")
    return every
