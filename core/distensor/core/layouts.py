"""How a weight is cut along one tensor dim: segments in order, each owned by one rank of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from distensor.core.errors import ShardingError


class Sliceable(Protocol):
    """What cutting and joining need of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...

    def narrow(self, dim: int, start: int, length: int) -> Self: ...

    def new_empty(self, size: Sequence[int]) -> Self: ...

    def copy_(self, src: Self) -> Self: ...


T = TypeVar("T", bound=Sliceable)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """A weight of the full `shape`, cut along `dim`.

    `segments` are (length, owner) in order along the dim; a rank holds its own in that order, one after the other. A
    fused weight (queries, keys and values in one) has several for each rank. A rank may own nothing.

    Raises:
        ShardingError: segments that do not add up to the dim, or an owner that is no rank.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: int
    segments: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape):
            raise ShardingError(f"a weight of shape {list(self.shape)} has no dim {self.dim}")
        total = sum(length for length, _ in self.segments)
        if total != self.shape[self.dim] or any(length < 0 for length, _ in self.segments):
            raise ShardingError(f"segments of {total} in all cannot cover dim {self.dim} of {list(self.shape)}")
        if strange := sorted({owner for _, owner in self.segments if not 0 <= owner < self.ranks}):
            raise ShardingError(f"segments are owned by ranks {strange}; the axis has {self.ranks}")

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, ranks: int, unit: int = 1) -> Self:
        """One segment for each rank, as even as multiples of `unit` allow; the first ranks get more.

        >>> WeightLayout.even((5, 8), 0, 2).segments
        ((3, 0), (2, 1))
        """
        lengths = even_lengths(shape[dim], ranks, unit)
        return cls(shape=tuple(shape), dim=dim, ranks=ranks, segments=tuple(zip(lengths, range(ranks), strict=True)))

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) along the dim of what `rank` holds, in order."""
        found, start = [], 0
        for length, owner in self.segments:
            if owner == rank:
                found.append((start, start + length))
            start += length
        return tuple(found)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        held = sum(length for length, owner in self.segments if owner == rank)
        return (*self.shape[: self.dim], held, *self.shape[self.dim + 1 :])

    def take(self, full: T, rank: int) -> T:
        """What `rank` holds of the full weight: a view where it is one range, else a copy."""
        self._check("the full weight", full, self.shape)
        ranges = self.ranges(rank)
        if len(ranges) <= 1:
            start, stop = ranges[0] if ranges else (0, 0)
            return full.narrow(self.dim, start, stop - start)
        return self._copied(full.new_empty(self.local_shape(rank)), full, ranges)

    def _copied(self, made: T, full: T, ranges: Sequence[tuple[int, int]]) -> T:
        at = 0
        for start, stop in ranges:
            made.narrow(self.dim, at, stop - start).copy_(full.narrow(self.dim, start, stop - start))
            at += stop - start
        return made

    def join(self, parts: Sequence[T]) -> T:
        """The full weight from what the ranks hold, in the order of the ranks."""
        if len(parts) != self.ranks:
            raise ShardingError(f"{len(parts)} parts of a weight that is cut for {self.ranks} ranks")
        full = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            self._check(f"the part of rank {rank}", part, self.local_shape(rank))
            at = 0
            for start, stop in self.ranges(rank):
                full.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return full

    def _check(self, what: str, value: Sliceable, shape: tuple[int, ...]) -> None:
        if tuple(value.shape) != shape:
            raise ShardingError(f"{what} has shape {list(value.shape)}; the layout says {list(shape)}")


def even_lengths(extent: int, ranks: int, unit: int = 1) -> tuple[int, ...]:
    """`extent` in `ranks` parts, each a multiple of `unit`.

    Raises:
        ShardingError: `unit` does not divide the extent.
    """
    units, rest = divmod(extent, unit)
    if rest:
        raise ShardingError(f"{extent} is no multiple of {unit}")
    share, more = divmod(units, ranks)
    return tuple(unit * (share + (rank < more)) for rank in range(ranks))
