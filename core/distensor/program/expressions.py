"""Sizes that depend on the batch: integer (rarely real) arithmetic over named dims, as plain data.

A size is an int, or a `Size` whose tree is a dim's name, a number, or (operator, operand, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from distensor.core.errors import ProgramRejectedError

Tree: TypeAlias = "str | int | float | tuple[str | int | float | Tree, ...]"
Number: TypeAlias = "int | float"

MAX_OPERANDS = 64
MAX_DEPTH = 24
MAX_MAGNITUDE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Size:
    """An expression over the dims of a program."""

    tree: Tree


Extent: TypeAlias = "int | Size"


def _product(values: Sequence[Number]) -> Number:
    return math.prod(values)


def _floor_divide(values: Sequence[Number]) -> Number:
    return values[0] // values[1]


def _modulo(values: Sequence[Number]) -> Number:
    return values[0] % values[1]


def _divide(values: Sequence[Number]) -> Number:
    return values[0] / values[1]


def _root(values: Sequence[Number]) -> Number:
    return math.sqrt(values[0])


def _to_float(values: Sequence[Number]) -> Number:
    return float(values[0])


def _floor(values: Sequence[Number]) -> Number:
    return math.floor(values[0])


OPERATORS: Mapping[str, tuple[Callable[[Sequence[Number]], Number], int | None]] = {
    "+": (sum, None),
    "*": (_product, None),
    "//": (_floor_divide, 2),
    "%": (_modulo, 2),
    "/": (_divide, 2),
    "max": (max, None),
    "min": (min, None),
    "sqrt": (_root, 1),
    "float": (_to_float, 1),
    "floor": (_floor, 1),
}
"""Operator -> function and its number of operands (None: two or more)."""


def evaluate(value: Extent, dims: Mapping[str, int]) -> Number:
    """The number that `value` stands for when the dims have these sizes."""
    if not isinstance(value, Size):
        return value
    try:
        return _evaluate(value.tree, dims)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise ProgramRejectedError(f"size {show(value)} with {dict(dims)}: {error}") from error


def _evaluate(tree: Tree, dims: Mapping[str, int]) -> Number:
    if isinstance(tree, str):
        return dims[tree]
    if not isinstance(tree, tuple):
        return tree
    function, _ = OPERATORS[str(tree[0])]
    result = function([_evaluate(operand, dims) for operand in tree[1:]])
    if not abs(result) <= MAX_MAGNITUDE:  # also false for nan
        raise OverflowError(f"{result!r} is beyond 2**63")
    return result


def check_tree(tree: object, known: frozenset[str] | set[str], depth: int = 0) -> Tree:
    """Turn decoded JSON (lists) into a tree, or raise ProgramRejectedError."""
    if depth > MAX_DEPTH:
        raise ProgramRejectedError(f"size expression is nested deeper than {MAX_DEPTH}")
    if isinstance(tree, str):
        if tree not in known:
            raise ProgramRejectedError(f"size expression names {tree!r}, which is none of the dims {sorted(known)}")
        return tree
    if isinstance(tree, bool) or not isinstance(tree, (int, float, list)):
        raise ProgramRejectedError(f"size expression holds {tree!r}; expected a dim, a number or an operation")
    if not isinstance(tree, list):
        return _check_number(tree)
    return _check_operation(tree, known, depth)


def _check_number(number: int | float) -> int | float:
    if not abs(number) <= MAX_MAGNITUDE:
        raise ProgramRejectedError(f"size expression holds {number!r}, beyond 2**63")
    return number


def _check_operation(tree: list[object], known: frozenset[str] | set[str], depth: int) -> Tree:
    if not tree or not isinstance(tree[0], str) or tree[0] not in OPERATORS:
        raise ProgramRejectedError(f"size expression has operator {tree[:1]!r}; known: {', '.join(OPERATORS)}")
    arity = OPERATORS[tree[0]][1]
    operands = len(tree) - 1
    fits = operands == arity if arity is not None else 2 <= operands <= MAX_OPERANDS
    if not fits:
        raise ProgramRejectedError(f"size operator {tree[0]!r} has {operands} operands")
    return (tree[0], *(check_tree(operand, known, depth + 1) for operand in tree[1:]))


def names(value: Extent) -> Iterator[str]:
    """Every dim that `value` depends on (with repeats)."""
    if isinstance(value, Size):
        yield from _names(value.tree)


def _names(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, tuple):
        for operand in tree[1:]:
            yield from _names(operand)


def show(value: Extent) -> str:
    """For messages: ("*", "batch", 4) -> (batch * 4)."""
    return _show(value.tree) if isinstance(value, Size) else str(value)


def _show(tree: Tree) -> str:
    if not isinstance(tree, tuple):
        return str(tree)
    operator, operands = str(tree[0]), [_show(operand) for operand in tree[1:]]
    if operator.isalpha():
        return f"{operator}({', '.join(operands)})"
    return "(" + f" {operator} ".join(operands) + ")"


def substitute(value: Extent, renamed: Mapping[str, str]) -> Extent:
    """The same expression with dims renamed."""
    return Size(_substitute(value.tree, renamed)) if isinstance(value, Size) else value


def _substitute(tree: Tree, renamed: Mapping[str, str]) -> Tree:
    if isinstance(tree, str):
        return renamed.get(tree, tree)
    if not isinstance(tree, tuple):
        return tree
    return (tree[0], *(_substitute(operand, renamed) for operand in tree[1:]))


def degree(value: Extent, dim: str) -> int | None:
    """The exponent of `dim` when `value` is a product that contains it (c * dim**k * ...), else None.

    A count with degree 1 in the batch is additive: it sums over any split of the rows.
    """
    if not isinstance(value, Size):
        return 0
    return _degree(value.tree, dim)


def _degree(tree: Tree, dim: str) -> int | None:
    if isinstance(tree, str):
        return 1 if tree == dim else 0
    if not isinstance(tree, tuple):
        return 0
    operands = [_degree(operand, dim) for operand in tree[1:]]
    if any(operand is None for operand in operands):
        return None
    known = [operand for operand in operands if operand is not None]
    if tree[0] == "*":
        return sum(known)
    if tree[0] == "float" or (tree[0] == "+" and len(set(known)) == 1):
        return known[0]
    return 0 if not any(known) else None
