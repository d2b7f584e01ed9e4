"""The collective operations of the table (`dist.*`) with their gradients.

The convention they keep: the gradient of a value that is the same on all ranks of an axis is the full gradient on
each of them, the gradient of a cut value is the slice that belongs to it. So no gradient is ever counted twice
(Shoeybi et al. 2019, "Megatron-LM", section 3: the operators f and g are `enter` and `reduce`).

Sums of 16-bit reals are made in 32 bits: that is the group's duty (`AxisGroup`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distensor.program.axes import AxisGroup, Reduction
from distensor.program.vocabulary import cross_entropy


@dataclass(frozen=True, slots=True)
class Pieces:
    """A dim seen as outer x segments x inner; segment i has `lengths[i]` and belongs to rank `owners[i]`."""

    dim: int
    outer: int
    inner: int
    lengths: Sequence[int]
    owners: Sequence[int]
    ranks: int

    def check(self) -> None:
        known = len(self.lengths) == len(self.owners) and all(0 <= owner < self.ranks for owner in self.owners)
        if not known or min((*self.lengths, self.outer, self.inner), default=0) < 0:
            raise ValueError(f"segments {self.lengths} of ranks {self.owners}: the axis has {self.ranks} ranks")

    def sizes(self) -> list[int]:
        """What each rank holds of the segments."""
        held = [0] * self.ranks
        for length, owner in zip(self.lengths, self.owners, strict=True):
            held[owner] += length
        return held

    def gather(self, group: AxisGroup, local: Tensor) -> Tensor:
        """The full dim on every rank."""
        sizes = self.sizes()
        is_plain = self.outer == 1 and list(self.owners) == sorted(self.owners)
        if is_plain:
            return group.all_gather(local, [size * self.inner for size in sizes], self.dim)
        opened = _opened(local, self.dim, (self.outer, sizes[group.rank], self.inner))
        joined = group.all_gather(opened, sizes, self.dim + 1)
        return self.ordered(joined, self.dim + 1).flatten(self.dim, self.dim + 2)

    def ordered(self, joined: Tensor, dim: int) -> Tensor:
        """From the order of the ranks to the order of the segments."""
        sizes = self.sizes()
        at = [sum(sizes[:rank]) for rank in range(self.ranks)]
        parts = []
        for length, owner in zip(self.lengths, self.owners, strict=True):
            parts.append(joined.narrow(dim, at[owner], length))
            at[owner] += length
        return torch.cat(parts, dim)

    def scatter(self, group: AxisGroup, full: Tensor) -> Tensor:
        """The sum over the ranks, of which each gets its own part."""
        opened = _opened(full, self.dim, (self.outer, sum(self.lengths), self.inner))
        pieces = Pieces(self.dim + 1, 1, 1, self.lengths, self.owners, self.ranks)
        by_rank = torch.cat([pieces.pick(rank, opened) for rank in range(self.ranks)], self.dim + 1)
        return group.reduce_scatter(by_rank, self.sizes(), self.dim + 1).flatten(self.dim, self.dim + 2)

    def pick(self, rank: int, full: Tensor) -> Tensor:
        """What `rank` holds of the full dim, as a tensor of its own."""
        opened = _opened(full, self.dim, (self.outer, sum(self.lengths), self.inner))
        start, parts = 0, []
        for length, owner in zip(self.lengths, self.owners, strict=True):
            if owner == rank:
                parts.append(opened.narrow(self.dim + 1, start, length))
            start += length
        kept = torch.cat(parts, self.dim + 1) if parts else opened.narrow(self.dim + 1, 0, 0)
        return kept.flatten(self.dim, self.dim + 2)


def _opened(value: Tensor, dim: int, factors: tuple[int, int, int]) -> Tensor:
    return value.reshape((*value.shape[:dim], *factors, *value.shape[dim + 1 :]))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: AxisGroup) -> Tensor:
        context.group = group
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.group.all_reduce(gradients[0], Reduction.SUM), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: AxisGroup) -> Tensor:
        del context
        return group.all_reduce(value, Reduction.SUM)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del context
        return gradients[0], None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: AxisGroup) -> Tensor:
        context.rank = group.rank
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] if context.rank == 0 else torch.zeros_like(gradients[0]), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: AxisGroup, pieces: Pieces) -> Tensor:
        context.rank, context.pieces = group.rank, pieces
        return pieces.gather(group, value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return context.pieces.pick(context.rank, gradients[0]), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: AxisGroup, pieces: Pieces) -> Tensor:
        context.group, context.pieces = group, pieces
        return pieces.gather(group, value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return context.pieces.scatter(context.group, gradients[0]), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, group: AxisGroup, pieces: Pieces) -> Tensor:
        context.group, context.pieces = group, pieces
        return pieces.pick(group.rank, value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return context.pieces.gather(context.group, gradients[0]), None, None


def enter(group: AxisGroup, value: Tensor) -> Tensor:
    """A value that is the same on all ranks goes into compute that differs: its gradients are summed."""
    return _Enter.apply(value, group)  # type: ignore[no-any-return,no-untyped-call]


def reduce(group: AxisGroup, value: Tensor) -> Tensor:
    """Partial sums become their sum, the same on all ranks."""
    return _Reduce.apply(value, group)  # type: ignore[no-any-return,no-untyped-call]


def once(group: AxisGroup, value: Tensor) -> Tensor:
    """The same everywhere; rank 0 alone keeps the gradient, for gradients that are summed over the ranks later."""
    return _Once.apply(value, group)  # type: ignore[no-any-return,no-untyped-call]


def maximum(group: AxisGroup, value: Tensor) -> Tensor:
    """The largest over the ranks, without a gradient."""
    return group.all_reduce(value.detach(), Reduction.MAX)


def gather(
    group: AxisGroup,
    value: Tensor,
    dim: int,
    lengths: Sequence[int],
    owners: Sequence[int],
    outer: int = 1,
    inner: int = 1,
) -> Tensor:
    """A cut dim becomes whole on every rank."""
    return _Gather.apply(value, group, _pieces(group, dim, lengths, owners, outer, inner))  # type: ignore[no-any-return,no-untyped-call]


def collect(
    group: AxisGroup,
    value: Tensor,
    dim: int,
    lengths: Sequence[int],
    owners: Sequence[int],
    outer: int = 1,
    inner: int = 1,
) -> Tensor:
    """A cut dim becomes whole on every rank and goes into compute that differs: its gradients are summed."""
    return _Collect.apply(value, group, _pieces(group, dim, lengths, owners, outer, inner))  # type: ignore[no-any-return,no-untyped-call]


def split(
    group: AxisGroup,
    value: Tensor,
    dim: int,
    lengths: Sequence[int],
    owners: Sequence[int],
    outer: int = 1,
    inner: int = 1,
) -> Tensor:
    """A value that is the same on all ranks becomes cut."""
    return _Split.apply(value, group, _pieces(group, dim, lengths, owners, outer, inner))  # type: ignore[no-any-return,no-untyped-call]


def _pieces(
    group: AxisGroup, dim: int, lengths: Sequence[int], owners: Sequence[int], outer: int, inner: int
) -> Pieces:
    pieces = Pieces(dim, outer, inner, lengths, owners, group.size)
    pieces.check()
    return pieces


COLLECTIVES: Mapping[str, Callable[..., Any]] = {
    "dist.enter.default": enter,
    "dist.reduce.default": reduce,
    "dist.once.default": once,
    "dist.maximum.default": maximum,
    "dist.gather.default": gather,
    "dist.collect.default": collect,
    "dist.split.default": split,
    "dist.cross_entropy.default": cross_entropy,
}
"""Each takes the group of its axis first."""
