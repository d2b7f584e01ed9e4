"""Arithmetic with sizes that depend on the batch: polynomials over the dims, so that equal sizes compare equal.

What is no polynomial (a floored division, a remainder, min, max) is one indivisible factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from math import prod
from typing import TypeAlias

from distensor.program.expressions import Extent, Size, Tree

Monomial: TypeAlias = tuple[Tree, ...]
"""Factors in a fixed order, with repeats."""
_MOST_TERMS = 32
Polynomial: TypeAlias = Mapping[Monomial, int]


def normal(value: Extent) -> Extent:
    """The one form that all equal sizes share (as far as they are polynomials)."""
    return value if isinstance(value, int) else _extent(_polynomial(value.tree))


def plus(values: Iterable[Extent]) -> Extent:
    """The sum."""
    values = tuple(values)
    known = literals(values)
    if known is not None:
        return sum(known)
    total: Counter[Monomial] = Counter()
    for value in values:
        for monomial, factor in _of(value).items():
            total[monomial] += factor
    return _extent(total)


def times(values: Iterable[Extent]) -> Extent:
    """The product."""
    values = tuple(values)
    known = literals(values)
    if known is not None:
        return prod(known)
    return _extent(reduce(_multiplied, (_of(value) for value in values), {(): 1}))


def divided(value: Extent, divisor: Extent) -> Extent | None:
    """`value / divisor` where that is a whole number for every batch, else None."""
    above, below = _of(value), _of(divisor)
    if not below:
        return None
    if not above:
        return 0
    if len(below) > 1:
        return _ratio(above, below)
    ((monomial, factor),) = below.items()
    terms = [(_without(term, monomial), count) for term, count in above.items()]
    if any(rest is None or count % factor for rest, count in terms):
        return None
    return _extent({rest: count // factor for rest, count in terms if rest is not None})


def _ratio(above: Polynomial, below: Polynomial) -> Extent | None:
    """Long division, largest term first; None unless it comes out even."""
    rest, quotient = Counter(above), Counter[Monomial]()
    bottom = max(below, key=_order)
    for _ in range(_MOST_TERMS):
        if not rest:
            return _extent(quotient)
        top = max(rest, key=_order)
        term = _without(top, bottom)
        if term is None or rest[top] % below[bottom]:
            return None
        count = rest[top] // below[bottom]
        quotient[term] += count
        for monomial, factor in _multiplied({term: count}, below).items():
            rest[monomial] -= factor
        rest = Counter({monomial: factor for monomial, factor in rest.items() if factor})
    return None


def _order(monomial: Monomial) -> tuple[int, str]:
    return len(monomial), repr(monomial)


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    rest = list(monomial)
    for factor in factors:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def _multiplied(left: Polynomial, right: Polynomial) -> dict[Monomial, int]:
    made: Counter[Monomial] = Counter()
    for one, first in left.items():
        for other, second in right.items():
            made[tuple(sorted((*one, *other), key=repr))] += first * second
    return {monomial: factor for monomial, factor in made.items() if factor}


def _of(value: Extent) -> Polynomial:
    if isinstance(value, Size):
        return _polynomial(value.tree)
    return {(): value} if value else {}


@lru_cache(maxsize=4096)
def _polynomial(tree: Tree) -> Polynomial:
    if isinstance(tree, str):
        return {(tree,): 1}
    if isinstance(tree, int):
        return {(): tree} if tree else {}
    if not isinstance(tree, tuple):
        return {(tree,): 1}
    operator, operands = tree[0], [_polynomial(operand) for operand in tree[1:]]
    if operator == "+":
        total: Counter[Monomial] = Counter()
        for operand in operands:
            total.update(operand)
        return {monomial: factor for monomial, factor in total.items() if factor}
    if operator == "*":
        return reduce(_multiplied, operands)
    return _divided(tree, operands)


def _divided(tree: tuple[str | int | float | Tree, ...], operands: list[Polynomial]) -> Polynomial:
    parts = [_extent(operand) for operand in operands]
    if tree[0] == "//":
        exact = divided(parts[0], parts[1])
        if exact is not None:
            return _of(exact)
    return {((tree[0], *(part.tree if isinstance(part, Size) else part for part in parts)),): 1}


def _extent(polynomial: Polynomial) -> Extent:
    terms = sorted(((term, count) for term, count in polynomial.items() if count), key=lambda pair: _order(pair[0]))
    if not terms:
        return 0
    trees = [_term(term, count) for term, count in terms]
    tree = trees[0] if len(trees) == 1 else ("+", *trees)
    return tree if isinstance(tree, int) else Size(tree)


def _term(monomial: Monomial, count: int) -> Tree:
    factors: tuple[Tree, ...] = monomial if count == 1 and monomial else (count, *monomial)
    return factors[0] if len(factors) == 1 else ("*", *factors)


def literals(values: tuple[Extent, ...]) -> list[int] | None:
    """The sizes as numbers where all are known, else None."""
    found = [value for value in values if not isinstance(value, Size)]
    return found if len(found) == len(values) else None
