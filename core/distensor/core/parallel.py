"""`ParallelConfig` and the arithmetic of ranks.

A rank's coordinates follow an order string such as "tp-cp-pp-dp": the leftmost axis varies fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from distensor.core.errors import ConfigError
from distensor.core.ids import Rank


class Axis(StrEnum):
    """The axes of the mesh."""

    TP = "tp"
    CP = "cp"
    PP = "pp"
    DP = "dp"


DEFAULT_ORDER = "tp-cp-pp-dp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place on each axis."""

    dp: int
    tp: int
    pp: int
    cp: int

    def on(self, axis: Axis) -> int:
        value: int = getattr(self, axis.value)
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many ways each axis cuts the work; the product is the number of ranks.

    Raises:
        ConfigError: a size below 1, or an order that does not name each axis once.
    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"ParallelConfig({name}={size!r}): expected an integer of at least 1")
        names = self.order.split("-") if isinstance(self.order, str) else []
        missing = [axis for axis in Axis if axis not in names and self.size(axis) > 1]
        if missing or len(set(names)) != len(names) or not set(names) <= set(Axis):
            raise ConfigError(
                f"ParallelConfig(order={self.order!r}): expected tp, cp, pp, dp, each once, joined by '-', "
                f"for example {DEFAULT_ORDER!r}; only an axis of size 1 may be left out"
            )

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All four axes, fastest varying first; those of size 1 that the order leaves out come last."""
        named = tuple(Axis(name) for name in self.order.split("-"))
        return (*named, *(axis for axis in Axis if axis not in named))

    def size(self, axis: Axis) -> int:
        return {
            Axis.DP: self.data_parallel,
            Axis.TP: self.tensor_parallel,
            Axis.PP: self.pipeline_parallel,
            Axis.CP: self.context_parallel,
        }[axis]

    def describe(self) -> str:
        return (
            f"dp {self.data_parallel} x tp {self.tensor_parallel} x pp {self.pipeline_parallel} x "
            f"cp {self.context_parallel}"
        )


class RankLayout:
    """The mesh as a grid: rank <-> coordinates, and the groups along any set of axes."""

    __slots__ = ("_axes", "_sizes", "_strides", "config")

    def __init__(self, config: ParallelConfig) -> None:
        self.config = config
        self._axes = config.axes
        self._sizes: Mapping[Axis, int] = {axis: config.size(axis) for axis in self._axes}
        self._strides: Mapping[Axis, int] = dict(
            zip(self._axes, grid_strides([self._sizes[axis] for axis in self._axes]), strict=True)
        )

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.config.world_size:
            raise ConfigError(f"rank {rank} is outside the mesh of {self.config.world_size} ranks")
        place = {axis.value: rank // self._strides[axis] % self._sizes[axis] for axis in self._axes}
        return Coordinates(**place)

    def rank(self, *, dp: int = 0, tp: int = 0, pp: int = 0, cp: int = 0) -> Rank:
        place = {Axis.DP: dp, Axis.TP: tp, Axis.PP: pp, Axis.CP: cp}
        for axis, index in place.items():
            if not 0 <= index < self._sizes[axis]:
                raise ConfigError(f"{axis}={index} is outside the axis of size {self._sizes[axis]}")
        return Rank(sum(index * self._strides[axis] for axis, index in place.items()))

    def groups(self, *axes: Axis) -> list[list[Rank]]:
        """All groups that vary along `axes` and are fixed on the others.

        Groups are listed by their fixed coordinates (first in the order string fastest); inside a group the
        ranks vary along `axes` in the order of the order string, whatever order `axes` are given in.
        """
        moving = [axis for axis in self._axes if axis in axes]
        fixed = [axis for axis in self._axes if axis not in axes]
        return [[Rank(base + offset) for offset in self._offsets(moving)] for base in self._offsets(fixed)]

    def group_of(self, rank: int, *axes: Axis) -> list[Rank]:
        """The one group along `axes` that holds `rank`."""
        place = self.coordinates(rank)
        base = sum(place.on(axis) * self._strides[axis] for axis in self._axes if axis not in axes)
        return [Rank(base + offset) for offset in self._offsets([axis for axis in self._axes if axis in axes])]

    def _offsets(self, axes: list[Axis]) -> Iterator[int]:
        ranges = [range(self._sizes[axis]) for axis in reversed(axes)]
        strides = [self._strides[axis] for axis in reversed(axes)]
        for indices in itertools.product(*ranges):
            yield sum(index * stride for index, stride in zip(indices, strides, strict=True))


def grid_strides(sizes: list[int]) -> list[int]:
    """Strides of a grid whose first dimension varies fastest.

    >>> grid_strides([2, 3, 4])
    [1, 2, 6]
    """
    return [math.prod(sizes[:index]) for index in range(len(sizes))]
