"""Arithmetic on sizes that may depend on the batch, and whether two of them are equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distensor.program.expressions import Extent, Size, Tree, evaluate
from distensor.program.values import Dim


def _tree(extent: Extent) -> Tree:
    return extent.tree if isinstance(extent, Size) else extent


def plus(*extents: Extent) -> Extent:
    """The sum, with its numbers added up."""
    moving = [_tree(extent) for extent in extents if isinstance(extent, Size)]
    fixed = sum(extent for extent in extents if isinstance(extent, int))
    if not moving:
        return fixed
    terms = [*moving, *([fixed] if fixed else [])]
    return Size(terms[0]) if len(terms) == 1 else Size(("+", *terms))


def times(*extents: Extent) -> Extent:
    """The product, with its numbers multiplied."""
    moving = [_tree(extent) for extent in extents if isinstance(extent, Size)]
    fixed = math.prod(extent for extent in extents if isinstance(extent, int))
    if not moving or fixed == 0:
        return fixed
    factors = [*moving, *([fixed] if fixed != 1 else [])]
    return Size(factors[0]) if len(factors) == 1 else Size(("*", *factors))


def minus(extent: Extent, other: Extent) -> Extent:
    return extent if other == 0 else plus(extent, times(other, -1))


def over(extent: Extent, divisor: Extent) -> Extent:
    """Floor division."""
    if divisor == 1:
        return extent
    if isinstance(extent, int) and isinstance(divisor, int):
        return extent // divisor
    return Size(("//", _tree(extent), _tree(divisor)))


def least(extent: Extent, other: Extent) -> Extent:
    if isinstance(extent, int) and isinstance(other, int):
        return min(extent, other)
    return extent if extent == other else Size(("min", _tree(extent), _tree(other)))


def most(extent: Extent, other: Extent) -> Extent:
    if isinstance(extent, int) and isinstance(other, int):
        return max(extent, other)
    return extent if extent == other else Size(("max", _tree(extent), _tree(other)))


_PRIMES = (1009, 2003, 4001, 7001, 11003, 17011, 23003, 31013)
_SMALL = (7, 11, 5, 13, 17, 19, 23, 29)


@dataclass(frozen=True, slots=True)
class Probes:
    """Sizes of the dims at which expressions are compared.

    Expressions of sizes are polynomials with floors, minima and maxima: those that agree at the sizes of the capture,
    at small and at several large sizes without common factors are taken for equal (Schwartz 1980 for polynomials).
    The shape check of every program at every new size stands behind this.
    """

    bindings: tuple[dict[str, int], ...]

    @staticmethod
    def of(dims: Sequence[Dim]) -> Probes:
        rows = [
            {dim.name: dim.example for dim in dims},
            {dim.name: _within(dim, _SMALL[at % 8] + at // 8) for at, dim in enumerate(dims)},
            *(
                {dim.name: _within(dim, _PRIMES[(at + turn) % 8] + at) for at, dim in enumerate(dims)}
                for turn in (0, 3)
            ),
        ]
        return Probes(tuple(rows))

    def values(self, extent: Extent) -> tuple[int, ...]:
        return tuple(int(evaluate(extent, binding)) for binding in self.bindings)

    def same(self, extent: Extent, other: Extent) -> bool:
        return extent == other or self.values(extent) == self.values(other)

    def product(self, extents: Iterable[Extent]) -> tuple[int, ...]:
        return self.values(times(*extents))


def _within(dim: Dim, size: int) -> int:
    if dim.maximum is None:
        return max(size, dim.minimum)
    return dim.minimum + size % (dim.maximum - dim.minimum + 1)
