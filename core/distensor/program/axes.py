"""The groups that collective operations of a program run in: one for each axis of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeAlias

from torch import Tensor

from distensor.core.errors import ProgramRejectedError
from distensor.core.parallel import Axis
from distensor.program.values import AxisSpec


class Reduction(StrEnum):
    """What an all-reduce computes."""

    SUM = "sum"
    MAX = "max"


class AxisGroup(Protocol):
    """The ranks of one axis that compute one thing together; all call the same in the same order.

    Nothing here is differentiable and nothing changes its arguments: results are new tensors. A sum is the same to
    the bit on every rank; 16-bit reals are added in 32 bits and rounded once.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        """The sum or maximum over the ranks, element by element."""
        ...

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The tensors of all ranks joined along `dim`; `sizes` are their extents there, by rank."""
        ...

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The sum over the ranks, of which each gets its part along `dim`; `sizes` are the parts, by rank."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send `parts[r]` to rank r; `shapes[r]` is what rank r sends here. All have one dtype."""
        ...

    def shift(self, tensor: Tensor, steps: int, shape: Sequence[int]) -> Tensor:
        """Around the ring: send to rank + steps, receive a tensor of `shape` from rank - steps."""
        ...


Groups: TypeAlias = Mapping[Axis, AxisGroup]


class MetaGroup:
    """Checks shapes: gives tensors of the right shape and talks to nobody."""

    def __init__(self, spec: AxisSpec) -> None:
        self.rank = spec.rank
        self.size = spec.size

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        del op
        return tensor.new_empty(tensor.shape)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        self._check(sizes, tensor.shape[dim], sizes[self.rank])
        return _resized(tensor, dim, sum(sizes))

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        self._check(sizes, tensor.shape[dim], sum(sizes))
        return _resized(tensor, dim, sizes[self.rank])

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        return [parts[0].new_empty(tuple(shape)) for shape in shapes]

    def shift(self, tensor: Tensor, steps: int, shape: Sequence[int]) -> Tensor:
        del steps
        return tensor.new_empty(tuple(shape))

    def _check(self, sizes: Sequence[int], found: int, expected: int) -> None:
        if len(sizes) != self.size or min(sizes) < 0 or found != expected:
            raise ValueError(f"parts of {list(sizes)} for {self.size} ranks, got a dim of {found}, not {expected}")


def _resized(tensor: Tensor, dim: int, extent: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = extent
    return tensor.new_empty(shape)


def meta_groups(specs: Sequence[AxisSpec]) -> dict[Axis, AxisGroup]:
    """Groups for the shape check of a program that declares these axes."""
    return {Axis(spec.name): MetaGroup(spec) for spec in specs}


def check_groups(specs: Sequence[AxisSpec], groups: Groups) -> None:
    """Raise ProgramRejectedError unless there is a group for every declared axis, of its size and rank."""
    for spec in specs:
        group = groups.get(Axis(spec.name))
        if group is None:
            raise ProgramRejectedError(
                f"the program is one of {spec.size} on the axis {spec.name!r}; its runner was given no group for it"
            )
        if (group.rank, group.size) != (spec.rank, spec.size):
            raise ProgramRejectedError(
                f"the program is for rank {spec.rank} of {spec.size} on the axis {spec.name!r}; "
                f"the group is rank {group.rank} of {group.size}"
            )
