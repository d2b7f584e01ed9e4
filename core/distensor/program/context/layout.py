"""Where the sequence is in a tensor of one rank, and how gradients of values that are not cut are to be read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from distensor.core.sequence import HeadTail
from distensor.program.context.extents import least, minus, most, over, plus, times
from distensor.program.expressions import Extent


@dataclass(frozen=True, slots=True)
class Layout:
    """A sequence in chunks: chunk i lies between `cuts[i]` and `cuts[i + 1]` and belongs to rank `owners[i]`."""

    cuts: tuple[Extent, ...]
    owners: tuple[int, ...]

    @staticmethod
    def of(division: HeadTail, length: Extent) -> Layout:
        """The division of a sequence of `length`, which may vary."""
        total = division.marks[-1]
        inner = (over(times(length, mark), total) for mark in division.marks[1:-1])
        return Layout((0, *inner, length), division.owners)

    @property
    def length(self) -> Extent:
        return self.cuts[-1]

    @property
    def lengths(self) -> tuple[Extent, ...]:
        return tuple(minus(stop, start) for start, stop in itertools.pairwise(self.cuts))

    def local(self, rank: int) -> Extent:
        """How many positions a rank holds."""
        return plus(*(length for length, owner in zip(self.lengths, self.owners, strict=True) if owner == rank))

    def window(self, start: Extent, stop: Extent) -> Layout:
        """Positions start to stop of this sequence, counted from start."""
        return Layout(tuple(minus(_clipped(cut, start, stop, self.length), start) for cut in self.cuts), self.owners)


def _clipped(cut: Extent, start: Extent, stop: Extent, length: Extent) -> Extent:
    """A cut moved into the window; the window's own ends stay simple expressions."""
    if cut == 0:
        return start
    if cut == length:
        return stop
    lower = cut if start == 0 else most(cut, start)
    return lower if stop == length else least(lower, stop)


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor dim `dim` is outer x sequence x inner, and the rank holds its chunks of the sequence."""

    dim: int
    layout: Layout
    outer: Extent = 1
    inner: Extent = 1

    @property
    def is_plain(self) -> bool:
        """Whether the dim is the sequence and nothing else."""
        return self.outer == 1 and self.inner == 1

    @property
    def extent(self) -> Extent:
        """The full extent of the dim."""
        return times(self.outer, self.layout.length, self.inner)

    def local(self, rank: int) -> Extent:
        """The extent of the dim on a rank."""
        return times(self.outer, self.layout.local(rank), self.inner)

    def at(self, dim: int) -> Split:
        return replace(self, dim=dim)


class Same(StrEnum):
    """A value that is the same on all ranks; its gradient on a rank is ..."""

    WHOLE = "whole"
    """the full gradient: it is computed with by all in the same way."""
    PARTIAL = "partial"
    """a part of a sum over the ranks, as that of parameters is until the reducer adds it up."""


State: TypeAlias = "Split | Same"
