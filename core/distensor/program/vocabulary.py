"""Cross entropy over logits whose classes are cut between the ranks: nothing is gathered but a few sums per row.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; label smoothing and class weights as torch defines them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distensor.program.axes import AxisGroup, Reduction

_NONE, _MEAN = 0, 1


@dataclass(frozen=True, slots=True)
class _Rows:
    """What each row counts for: `hit` its target's loss, `smooth` the loss of all classes; 0 where it is ignored."""

    hit: Tensor
    smooth: Tensor
    divisor: Tensor | None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, target: Tensor, weight: Tensor | None, group: AxisGroup, options: _Options
    ) -> Tensor:
        own = options.rows(logits)
        local = target.reshape(-1) - options.start
        foreign = (local < 0) | (local >= own.shape[1])
        local = local.masked_fill(foreign, 0)
        largest = group.all_reduce(own.amax(1), Reduction.MAX)
        raised = (own - largest[:, None]).exp_()
        picked = own.gather(1, local[:, None])[:, 0].masked_fill(foreign, 0)
        shares = None if weight is None else weight[options.start : options.start + own.shape[1]].to(own.dtype)
        parts = [raised.sum(1), picked]
        if options.smoothing:
            parts.append(own.sum(1) if shares is None else own @ shares)
        sums = group.all_reduce(torch.stack(parts), Reduction.SUM)
        rows = options.count(target.reshape(-1), weight, own.dtype)
        logarithm = sums[0].log() + largest
        mass = options.mass(weight, own.dtype)
        loss = rows.hit * (logarithm - sums[1])
        if options.smoothing:
            loss = loss + rows.smooth * (mass * logarithm - sums[2])
        context.save_for_backward(raised, sums[0], local, foreign, rows.hit, rows.smooth, mass, shares, rows.divisor)
        context.options, context.shape, context.dtype = options, logits.shape, logits.dtype
        return options.reduced(loss, rows, target.shape).to(logits.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        raised, total, local, foreign, hit, smooth, mass, shares, divisor = context.saved_tensors
        options: _Options = context.options
        scale = gradients[0].reshape(-1).to(raised.dtype)
        if divisor is not None:
            scale = scale / divisor
        hit, smooth = hit * scale, smooth * scale
        pull = hit + smooth * mass if options.smoothing else hit
        made = raised * (pull / total)[:, None]
        made.scatter_add_(1, local[:, None], -hit.masked_fill(foreign, 0)[:, None])
        if options.smoothing:
            made -= smooth[:, None] if shares is None else smooth[:, None] * shares
        return options.shaped(made, context.shape).to(context.dtype), None, None, None, None


@dataclass(frozen=True, slots=True)
class _Options:
    reduction: int
    ignore: int
    smoothing: float
    start: int
    classes: int

    def rows(self, logits: Tensor) -> Tensor:
        """[rows, own classes] in 32 bits at least."""
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        dim = 1 if logits.ndim > 1 else 0
        return wide.movedim(dim, -1).reshape(-1, logits.shape[dim])

    def shaped(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Back to the shape of the logits."""
        if len(shape) < 2:
            return rows.reshape(shape)
        return rows.reshape((shape[0], *shape[2:], shape[1])).movedim(-1, 1)

    def count(self, target: Tensor, weight: Tensor | None, dtype: torch.dtype) -> _Rows:
        counted = target != self.ignore
        ones = counted.to(dtype)
        share = ones if weight is None else weight.to(dtype)[target.masked_fill(~counted, 0)] * ones
        divisor = share.sum() if self.reduction == _MEAN else None
        return _Rows(hit=share * (1 - self.smoothing), smooth=ones * (self.smoothing / self.classes), divisor=divisor)

    def mass(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The weights of all classes added."""
        return torch.tensor(float(self.classes), dtype=dtype) if weight is None else weight.to(dtype).sum()

    def reduced(self, loss: Tensor, rows: _Rows, shape: torch.Size) -> Tensor:
        if self.reduction == _NONE:
            return loss.reshape(shape)
        return loss.sum() if rows.divisor is None else loss.sum() / rows.divisor


def cross_entropy(
    group: AxisGroup,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    start: int,
    classes: int,
) -> Tensor:
    """torch's cross entropy of `classes` classes, of which this rank has those from `start`.

    `logits` have the classes in dim 1 (dim 0 of a single row); `target` and `weight` are whole.
    """
    options = _Options(reduction, ignore_index, label_smoothing, start, classes)
    return _CrossEntropy.apply(logits, target, weight, group, options)  # type: ignore[no-any-return,no-untyped-call]
