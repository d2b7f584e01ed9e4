"""Joining what the ranks of a context-parallel group hold, with and without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.distributed.agreement import Call, agree, check_member, check_same, mismatch
from distensor.core.distributed.objects import decode, encode
from distensor.core.distributed.split import checked_dim
from distensor.core.errors import ConfigError

T = TypeVar("T")


class GatherGradient(StrEnum):
    """What flows back to a rank's part of a gathered tensor."""

    OWN_SLICE = "own_slice"
    """The slice of this rank's own gradient: right where every rank computes the same loss from the whole."""
    SUM = "sum"
    """The sum of all ranks' gradients of the slice: right where the loss is the sum of what the ranks compute."""


def cat_outputs_cp(
    x: Tensor, seq_dim: int, cp_group: dist.ProcessGroup | None = None, *, lengths: Sequence[int] | None = None
) -> Tensor:
    """The parts of all ranks, joined along `seq_dim` in group order, without a gradient.

    Args:
        lengths: the length of each rank's part, for parts that differ; None means equal parts.

    Returns:
        `x` itself where `cp_group` is None.

    Raises:
        GroupMismatchError: other shapes, dtypes or arguments on some rank; on every rank.
        TransportTimeoutError: a rank did not take part, by its number.
    """
    if cp_group is None:
        return x
    group = check_member(cp_group)
    dim = _checked(group, "cat_outputs_cp", x, seq_dim, lengths)
    with torch.no_grad():
        return torch.cat(_parts(x.detach(), dim, group, lengths), dim)


def cat_outputs_cp_with_grad(
    x: Tensor,
    seq_dim: int,
    cp_group: dist.ProcessGroup | None = None,
    *,
    gradient: GatherGradient | str = GatherGradient.OWN_SLICE,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """`cat_outputs_cp` with a gradient to `x`.

    Args:
        gradient: "own_slice" (no communication in the backward pass) or "sum" (a reduce-scatter, in which every rank
            must take part); see `GatherGradient`.
    """
    if cp_group is None:
        return x
    group = check_member(cp_group)
    if gradient not in tuple(GatherGradient):
        raise ConfigError(f"gradient={gradient!r}: expected one of {', '.join(GatherGradient)}")
    name = f"cat_outputs_cp_with_grad(gradient={str(gradient)!r})"
    dim = _checked(group, name, x, seq_dim, lengths, summed=gradient == GatherGradient.SUM)
    joined: Tensor = _Gather.apply(x, dim, group, lengths, GatherGradient(gradient))  # type: ignore[no-untyped-call]
    return joined


def cat_outputs_cp_object_list(object_list: list[T], cp_group: dist.ProcessGroup | None = None) -> list[T]:
    """The lists of all ranks as one, in group order; the list itself where `cp_group` is None. No pickle is used.

    Raises:
        ConfigError: an item that is not plain data, see `objects.encode`.
    """
    if cp_group is None:
        return object_list
    group = check_member(cp_group)
    calls = agree(group, "cat_outputs_cp_object_list", lambda: {"items": encode(object_list).decode()})
    return [item for answer in calls for item in decode(answer["items"].encode())]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        group: dist.ProcessGroup,
        lengths: Sequence[int] | None,
        gradient: GatherGradient,
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.gradient = dim, group, gradient
        ctx.parts = list(lengths or [x.shape[dim]] * group.size())
        return torch.cat(_parts(x, dim, group, lengths), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        pieces = [piece.contiguous() for piece in torch.split(grad, ctx.parts, ctx.dim)]
        own = pieces[ctx.group.rank()]
        if ctx.gradient is GatherGradient.SUM:
            own = torch.empty_like(own)
            dist.reduce_scatter(own, pieces, group=ctx.group)
        return own, None, None, None, None


def _checked(
    group: dist.ProcessGroup,
    name: str,
    x: Tensor,
    seq_dim: int,
    lengths: Sequence[int] | None,
    *,
    summed: bool = False,
) -> int:
    """The dim, counted from the front, once all ranks agree. `summed`: the backward pass communicates."""
    calls = agree(group, name, lambda: _described(x, seq_dim, lengths, summed))
    for field, problem in _MUST_AGREE.items():
        check_same(group, calls, field, problem)
    found = [call["length"] for call in calls]
    if lengths is not None and found != list(lengths):
        raise mismatch(group, f"{name}: the parts are not as long as lengths={list(lengths)} says", found)
    if lengths is None:
        check_same(group, calls, "length", "the lengths along seq_dim differ (lengths= allows that)")
    return int(calls[group.rank()]["seq_dim"])


_MUST_AGREE = {
    "dtype": "the dtypes differ",
    "seq_dim": "seq_dim differs",
    "other_dims": "the sizes of the other dims differ",
    "lengths": "lengths= differs",
    "backward": "some ranks need a gradient and others do not, and its sum takes all of them",
}


def _described(x: Tensor, seq_dim: int, lengths: Sequence[int] | None, summed: bool) -> Call:
    dim = checked_dim(x.ndim, seq_dim)
    return {
        "dtype": str(x.dtype),
        "seq_dim": dim,
        "other_dims": [size for index, size in enumerate(x.shape) if index != dim],
        "length": x.shape[dim],
        "lengths": None if lengths is None else list(lengths),
        "backward": summed and x.requires_grad and torch.is_grad_enabled(),
    }


def _parts(x: Tensor, dim: int, group: dist.ProcessGroup, lengths: Sequence[int] | None) -> list[Tensor]:
    """Every rank's part. Backends gather equal shapes only: shorter parts travel padded."""
    if lengths is None or len(set(lengths)) == 1:
        return _all_gather(x.contiguous(), group)
    padding = list(x.shape)
    padding[dim] = max(lengths) - x.shape[dim]
    rows = _all_gather(torch.cat([x, x.new_zeros(padding)], dim), group)
    return [row.narrow(dim, 0, length) for row, length in zip(rows, lengths, strict=True)]


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    rows = [torch.empty_like(x) for _ in range(group.size())]
    if x.numel() > 0:
        dist.all_gather(rows, x, group=group)
    return rows
