"""One node against its signature: known operation, arity, kinds of arguments, number of results."""

from __future__ import annotations

import math
import re
from typing import NoReturn

from distensor.core.errors import ProgramRejectedError
from distensor.program.expressions import Size
from distensor.program.ops import FIXED_ARGUMENTS, MEMORY_FORMATS, RANDOM, WORDS
from distensor.program.signatures import SIGNATURES, Kind, Parameter, Signature
from distensor.program.values import Argument, DType, Node, Ref, WeightRef

_MOST_ENTRIES = 64
"""Dims of a shape and the like: torch itself handles 64, and some of its loops recurse over them."""

_LONG_LISTS = frozenset(
    {
        "aten.cat.default",
        "aten.concat.default",
        "aten.stack.default",
        "aten.hstack.default",
        "aten.vstack.default",
        "aten.split.sizes",
        "aten.split_with_sizes.default",
        "dist.attention.default",
        "dist.collect.default",
        "dist.gather.default",
        "dist.split.default",
    }
)


def check_node(node: Node) -> None:
    """Raise ProgramRejectedError unless the node fits the table."""
    signature = SIGNATURES.get(node.op)
    if signature is None:
        raise ProgramRejectedError(f"operation {node.op!r} in {node.module!r} is not in the table of this version")
    _check_names(node, signature)
    for parameter in signature.parameters:
        if parameter.name in node.args:
            _check_argument(node, parameter, node.args[parameter.name])
        elif parameter.required:
            raise ProgramRejectedError(f"{node.op} in {node.module!r} lacks its argument {parameter.name!r}")
    _check_results(node, signature)


def _check_names(node: Node, signature: Signature) -> None:
    known = {parameter.name for parameter in signature.parameters}
    if unknown := sorted(node.args.keys() - known):
        raise ProgramRejectedError(f"{node.op} takes {sorted(known)}, not {unknown}")
    for (op, name), value in FIXED_ARGUMENTS.items():
        if op == node.op and node.args.get(name, value) is not value:
            raise ProgramRejectedError(f"{node.op} may only run with {name}={value}")
    if node.site is not None and node.op not in RANDOM:
        raise ProgramRejectedError(f"{node.op} draws no random numbers and takes no site")


def _check_results(node: Node, signature: Signature) -> None:
    if signature.results is not None and len(node.out) != signature.results:
        raise ProgramRejectedError(f"{node.op} gives {signature.results} results, not {len(node.out)}")
    if not node.out:
        raise ProgramRejectedError(f"{node.op} in {node.module!r} gives no result")


def _check_argument(node: Node, parameter: Parameter, value: Argument) -> None:
    if value is None and parameter.optional:
        return
    if not parameter.is_list:
        _check_item(node, parameter, value)
        return
    if not isinstance(value, tuple) or (len(value) > _MOST_ENTRIES and node.op not in _LONG_LISTS):
        _refuse(node, parameter, value)
    for item in value:
        if not (item is None and parameter.optional_items):
            _check_item(node, parameter, item)


def _check_item(node: Node, parameter: Parameter, value: Argument) -> None:
    if not fits(parameter.kind, value):
        _refuse(node, parameter, value)


def fits(kind: Kind, value: Argument) -> bool:
    """Whether a single argument is of this kind."""
    if kind is Kind.TENSOR:
        return isinstance(value, (Ref, WeightRef))
    if kind is Kind.TENSOR_OR_NUMBER:
        return isinstance(value, (Ref, WeightRef)) or _is_number(value)
    if kind is Kind.INTEGER:
        return isinstance(value, Size) or (isinstance(value, int) and not isinstance(value, bool))
    if kind is Kind.NUMBER:
        return _is_number(value)
    if kind is Kind.REAL:
        return _is_number(value) and not isinstance(value, bool)
    if kind is Kind.BOOLEAN:
        return isinstance(value, bool)
    if kind is Kind.EQUATION:
        return isinstance(value, str) and _EQUATION.fullmatch(value) is not None
    return isinstance(value, str) and value in _CHOICES[kind]


_EQUATION = re.compile(r"[a-zA-Z]{0,16}(,[a-zA-Z]{0,16})?->[a-zA-Z]{0,16}")
"""einsum of one or two tensors: of more, torch makes values in between whose size nobody has checked."""


_CHOICES = {Kind.DTYPE: frozenset(DType), Kind.WORD: WORDS, Kind.MEMORY_FORMAT: MEMORY_FORMATS}


def _is_number(value: Argument) -> bool:
    return isinstance(value, (bool, int, float, Size)) and not (isinstance(value, float) and math.isnan(value))


def _refuse(node: Node, parameter: Parameter, value: Argument) -> NoReturn:
    text = repr(value)
    shown = text if len(text) <= 80 else text[:77] + "..."
    raise ProgramRejectedError(
        f"{node.op} in {node.module!r}: argument {parameter.name}={shown} is not of kind {parameter.kind.name}"
        f"{' list' if parameter.is_list else ''}"
    )
