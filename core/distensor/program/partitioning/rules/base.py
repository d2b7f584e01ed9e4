"""What rules share: how cut operands line up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from distensor.program.builder import Name
from distensor.program.expressions import Extent
from distensor.program.partitioning.layout import Layout, Shard
from distensor.program.partitioning.rewriter import Loose, Rewriter
from distensor.program.values import Ref, WeightRef

Rule: TypeAlias = Callable[[Rewriter], None]
"""Reads `rewriter.node`, of which at least one tensor is cut, and binds its results."""


def tensors(value: Loose) -> Iterator[Name]:
    """The tensors in an argument."""
    if isinstance(value, (Ref, WeightRef)):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)


def over(value: Loose, change: Callable[[Name], Name]) -> Loose:
    """An argument with its tensors changed."""
    if isinstance(value, (Ref, WeightRef)):
        return change(value)
    return tuple(over(item, change) for item in value) if isinstance(value, tuple) else value


def is_one(extent: Extent) -> bool:
    return extent == 1


def lead(rewriter: Rewriter, names: Iterator[Name], shape: tuple[Extent, ...]) -> Shard | None:
    """How the result of a broadcast should be cut: like the first operand that is, following all that agree."""
    found: Shard | None = None
    for name in names:
        shard = rewriter.shard(name)
        if shard is None:
            continue
        dim = shard.dim + len(shape) - len(rewriter.shape(name))
        if is_one(rewriter.shape(name)[shard.dim]) and not is_one(shape[dim]):
            continue
        if found is None:
            found = Shard(dim=dim, layout=shard.layout)
        elif found.dim == dim and found.layout == shard.layout:
            found = Shard(dim=dim, layout=found.layout.joined(shard.layout))
    return found


def broadcast(rewriter: Rewriter, name: Name, shape: tuple[Extent, ...], result: Shard) -> Name:
    """One operand of a broadcast to `shape` whose result is cut like `result`."""
    own = rewriter.shape(name)
    dim = result.dim - len(shape) + len(own)
    if dim < 0 or (is_one(own[dim]) and not is_one(shape[result.dim])):
        return rewriter.outside(name)
    return rewriter.aligned(name, Shard(dim=dim, layout=result.layout))


def following(rewriter: Rewriter, names: Iterator[Name], layout: Layout) -> Layout:
    """`layout`, following also the weights behind these operands that are cut alike."""
    for name in names:
        shard = rewriter.shard(name)
        if shard is not None and shard.layout == layout:
            layout = layout.joined(shard.layout)
    return layout
