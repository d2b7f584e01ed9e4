"""Workers that train on their own for many steps and exchange what came of it: DiLoCo and SparseLoCo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.errors import ConfigError, FrameError
from distensor.core.update_bytes import CHUNK
from distensor.optim.distro.exchange import Exchange, exchange_of
from distensor.optim.distro.protection import Exchanged, robust_mean
from distensor.optim.distro.sparse import RESIDUAL, SparseOptimizer
from distensor.optim.sparse_spec import LOCAL, Average

ANCHOR, MOMENTUM = "anchor", "momentum"


class DiLoCo(torch.optim.AdamW):
    """DiLoCo (Douillard et al., 2023): AdamW on each worker; every `every` steps Nesterov momentum on the mean change.

    Gradients that are no finite numbers are not used, and neither is a change that is none: the worker goes back to
    the anchor. Both are counted in `dropped`.

    Args:
        lr, betas, eps, weight_decay: of the inner AdamW.
        every: inner steps between two exchanges.
        outer_lr, outer_momentum: of the outer step.
        average: how the workers' changes become one: "mean" over an all-reduce; "trimmed" and "centred" do without
            what a few workers send (`protection.py`), and every worker gets the changes of all.
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
        average: str = Average.MEAN,
        group: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._every = _checked(every)
        self._average = Average(average)
        self._outer_lr, self._outer_momentum = outer_lr, outer_momentum
        self._tensors = [p for group_ in self.param_groups for p in group_["params"] if p.requires_grad]
        device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self._exchange = exchange or exchange_of(group, device)
        self._inner_steps = 0
        self.applied = 0
        """Exchanges whose outcome is in the anchor: equal on workers that hold the same."""
        self.bytes_sent = 0
        """Of values: as a ring all-reduce moves them, 2 (size - 1) / size of four bytes each, or one copy to all."""
        self.dropped = 0
        self.exchanged = Exchanged()
        """What there was to notice about the newest exchange."""
        self._anchors = [p.detach().to(torch.float32).clone() for p in self._tensors]
        self._momenta = [torch.zeros_like(anchor) for anchor in self._anchors]
        self._numbers = {id(p): number for number, p in enumerate(self._tensors)}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One inner step, and the outer one when it is time. All workers call it equally often."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.advance(exchange=(self._inner_steps + 1) % self._every == 0)
        return loss

    def advance(self, *, exchange: bool) -> None:
        """One step of one's own, and the exchange where all workers say so."""
        if are_finite(p.grad for p in self._tensors if p.grad is not None):
            super().step()
        else:
            self.dropped += 1
        self._inner_steps += 1
        if exchange:
            self.exchange()

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
    def exchange(self) -> None:
        """The outer step. All workers call it at the same time."""
        changes = [anchor - p.to(torch.float32) for p, anchor in zip(self._tensors, self._anchors, strict=True)]
        flat = torch.cat([change.reshape(-1) for change in changes]) if changes else torch.zeros(0)
        if not are_finite([flat]):
            self.dropped += 1
            self.state.clear()
            flat = torch.full_like(flat, torch.nan)
        self.apply_mean(self._mean(flat) if self._average is Average.MEAN else self._robust_mean(flat))

    def _mean(self, flat: Tensor) -> Tensor:
        """Over an all-reduce, with a mark for each worker that has nothing to say."""
        size, silent = self._exchange.size, bool(flat.isnan().any())
        marks = torch.zeros(size, device=flat.device)
        marks[self._exchange.rank] = float(silent)
        both = torch.cat([torch.zeros_like(flat) if silent else flat, marks])
        self._exchange.mean(both)
        self.bytes_sent += 2 * (size - 1) * flat.numel() * 4 // size
        self.exchanged = Exchanged(silent=tuple(int(rank) for rank in both[flat.numel() :].nonzero().view(-1)))
        return both[: flat.numel()]

    def _robust_mean(self, flat: Tensor) -> Tensor:
        own = b"" if bool(flat.isnan().any()) else flat.cpu().numpy().tobytes()
        messages = self._exchange.gather(own)
        self.bytes_sent += len(own)
        for rank, message in enumerate(messages):
            if message and len(message) != 4 * flat.numel():
                raise FrameError(f"worker {rank} sent {len(message)} bytes of changes; expected {4 * flat.numel()}")
        found = [None if not m else torch.from_numpy(np.frombuffer(m, dtype=np.float32).copy()) for m in messages]
        rows = [row for row in found if row is not None and are_finite([row])]
        self.exchanged = Exchanged(
            silent=tuple(rank for rank, row in enumerate(found) if row is None or not are_finite([row]))
        )
        return robust_mean(torch.stack(rows), self._average).to(flat.device) if rows else torch.zeros_like(flat)

    @torch.no_grad()
    def apply_mean(self, flat: Tensor) -> None:
        """The outer step for the mean over all workers of (anchor - weights), flat, in the order of the parameters."""
        self.applied += 1
        parts = torch.split(flat, [p.numel() for p in self._tensors])
        for p, anchor, momentum, part in zip(self._tensors, self._anchors, self._momenta, parts, strict=True):
            change = part.view(p.shape)
            momentum.mul_(self._outer_momentum).add_(change)
            anchor.sub_(change + self._outer_momentum * momentum, alpha=self._outer_lr)
            p.copy_(anchor)

    def anchor_of(self, parameter: Tensor) -> Tensor:
        """What all workers had in common after the last exchange, in float32."""
        anchor: Tensor = self._anchors[self._numbers[id(parameter)]]
        return anchor

    def fields(self, parameter: Tensor) -> dict[str, Tensor]:
        """Everything that the next steps depend on, the living tensors: AdamW's, `anchor`, its `momentum`, and `local`,
        this worker's present weights."""
        number = self._numbers[id(parameter)]
        outer = {ANCHOR: self._anchors[number], MOMENTUM: self._momenta[number], LOCAL: parameter.detach()}
        return {**_adam_fields(self, parameter), **outer}

    @torch.no_grad()
    def load_fields(self, parameter: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Go on from what `fields` returned. Without any: from the present weights, as at the start."""
        number = self._numbers[id(parameter)]
        self._anchors[number].copy_(fields.get(ANCHOR, parameter))
        self._momenta[number].copy_(fields.get(MOMENTUM, torch.zeros_like(parameter)))
        parameter.copy_(fields.get(LOCAL, parameter))
        _load_adam(self, parameter, fields)


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
        clip_messages: float | None = 4.0,
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
            clip_messages=clip_messages,
        )
        self._every = _checked(every)
        self._outer_lr, self._feedback = outer_lr, feedback
        self._inner = torch.optim.AdamW(self.param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._inner_steps = 0
        self._anchors = [p.detach().to(torch.float32).clone() for p in self._tensors]
        self._numbers = {id(p): number for number, p in enumerate(self._tensors)}

    def inner_step(self) -> bool:
        """One step of AdamW with the present learning rates; whether it is time to exchange.

        Gradients that are no finite numbers are not used.
        """
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = own["lr"]
        if are_finite(p.grad for p in self._tensors if p.grad is not None):
            self._inner.step()
        else:
            self.dropped += 1
        self._inner_steps += 1
        return self._inner_steps % self._every == 0

    def advance(self, *, exchange: bool) -> None:
        """See `DiLoCo`."""
        self.inner_step()
        if exchange:
            self.exchange()

    def exchange(self) -> None:
        """See `DiLoCo`."""
        self._exchange_and_apply(self.propose())

    def _advance(self) -> None:
        self.advance(exchange=(self._inner_steps + 1) % self._every == 0)

    def _sources(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def _forget(self) -> None:
        self._inner.state.clear()

    def _accumulate(self) -> None:
        for parameter, anchor in zip(self._tensors, self._anchors, strict=True):
            change = anchor - parameter.to(torch.float32)
            self._residual_of(parameter).mul_(self._feedback).add_(change)

    @torch.no_grad()
    def _undo(self, message: bytes) -> None:
        """The change is made anew in the next exchange: it must not be in the residual already."""
        super()._undo(message)
        for parameter, anchor in zip(self._tensors, self._anchors, strict=True):
            self._residual_of(parameter).sub_(anchor - parameter.to(torch.float32))

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

    def anchor_of(self, parameter: Tensor) -> Tensor:
        """See `DiLoCo`."""
        anchor: Tensor = self._anchors[self._numbers[id(parameter)]]
        return anchor

    def fields(self, parameter: Tensor) -> dict[str, Tensor]:
        """See `DiLoCo`: AdamW's, `residual`, `anchor` and `local`."""
        outer = {
            RESIDUAL: self._residual_of(parameter),
            ANCHOR: self.anchor_of(parameter),
            LOCAL: parameter.detach(),
        }
        return {**_adam_fields(self._inner, parameter), **outer}

    @torch.no_grad()
    def load_fields(self, parameter: Tensor, fields: Mapping[str, Tensor]) -> None:
        """See `DiLoCo`."""
        self.anchor_of(parameter).copy_(fields.get(ANCHOR, parameter))
        self._residual_of(parameter).copy_(fields.get(RESIDUAL, torch.zeros_like(parameter)))
        parameter.copy_(fields.get(LOCAL, parameter))
        _load_adam(self._inner, parameter, fields)


LocalSteps: TypeAlias = DiLoCo | SparseLoCo
"""Optimizers whose workers leave what they have in common, the anchor, until the next exchange."""


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements are numbers; their sums tell, since an overflow of a sum is none to go on with either."""
    return all(bool(torch.isfinite(tensor.sum())) for tensor in tensors)


def _adam_fields(adam: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """As they would be after the first step, where there was none yet."""
    state = adam.state.get(parameter, {})
    if not state:
        zeros = torch.zeros_like(parameter, dtype=torch.float32)
        return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _load_adam(adam: torch.optim.Optimizer, parameter: Tensor, fields: Mapping[str, Tensor]) -> None:
    adam.state.pop(parameter, None)
    own = {name: value for name, value in fields.items() if name in ("step", "exp_avg", "exp_avg_sq")}
    if own:
        device = {name: "cpu" if name == "step" else parameter.device for name in own}
        adam.state[parameter] = {name: value.detach().to(device[name], copy=True) for name, value in own.items()}


@torch.no_grad()
def _copy_all(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    for target, source in zip(into, of, strict=True):
        target.copy_(source)


def _checked(every: int) -> int:
    if every < 1:
        raise ConfigError(f"every = {every}; expected at least 1 inner step between two exchanges")
    return every
