"""What the captured graph assumes about sizes (`if x.shape[1] > 8:` at capture), checked on every batch.

torch.export writes these as Python expressions; they are read with `ast` and evaluated by hand.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distensor.core.errors import CaptureError

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_CALLS: Mapping[str, Callable[..., Any]] = {"max": max, "min": min, "abs": abs, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Guard:
    """One assumption. `text` names tensors as the user does: input_ids.shape[1] <= 64."""

    text: str
    expression: ast.expr

    def holds(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        return bool(_evaluate(self.expression, shapes))


def parse_guards(exported: Any, names: Sequence[str]) -> tuple[Guard, ...]:
    """The guards of an exported program."""
    found = []
    for code in getattr(exported, "_guards_code", None) or ():
        text = _SIZE.sub(lambda match: f"{_subscript(names[int(match[1])])}[{match[2]}]", code)
        expression = ast.parse(text, mode="eval").body
        shown = re.sub(r"S\['([^']+)'\]", r"\1.shape", text)
        _check(expression, shown)
        found.append(Guard(shown, expression))
    return tuple(found)


def _subscript(name: str) -> str:
    return f"S[{name!r}]"


def _check(expression: ast.expr, text: str) -> None:
    try:
        _evaluate(expression, _Ones())
    except (ZeroDivisionError, OverflowError):
        return
    except NotImplementedError as error:
        raise CaptureError(
            f"the module's control flow depends on sizes in a way that cannot be checked: {text}"
        ) from error


class _Ones(dict[str, Sequence[int]]):
    """Shapes of ones, to see whether an expression can be evaluated at all."""

    def __missing__(self, key: str) -> Sequence[int]:
        return [1] * 32


def _evaluate(node: ast.expr, shapes: Mapping[str, Sequence[int]]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_evaluate(node.left, shapes), _evaluate(node.right, shapes))
    if isinstance(node, ast.UnaryOp):
        return _unary(node, shapes)
    if isinstance(node, ast.BoolOp):
        values = [_evaluate(value, shapes) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare):
        return _comparison(node, shapes)
    if isinstance(node, ast.Subscript):
        return _size(node, shapes)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        return _CALLS[node.func.id](*(_evaluate(argument, shapes) for argument in node.args))
    raise NotImplementedError(ast.dump(node))


def _unary(node: ast.UnaryOp, shapes: Mapping[str, Sequence[int]]) -> Any:
    value = _evaluate(node.operand, shapes)
    if isinstance(node.op, ast.Not):
        return not value
    if isinstance(node.op, ast.USub):
        return -value
    raise NotImplementedError(ast.dump(node))


def _comparison(node: ast.Compare, shapes: Mapping[str, Sequence[int]]) -> bool:
    left = _evaluate(node.left, shapes)
    for compare, right_node in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(right_node, shapes)
        if type(compare) not in _COMPARE:
            raise NotImplementedError(ast.dump(node))
        if not _COMPARE[type(compare)](left, right):
            return False
        left = right
    return True


def _size(node: ast.Subscript, shapes: Mapping[str, Sequence[int]]) -> int:
    """S['input_ids'][1]."""
    inner, index = node.value, node.slice
    if not isinstance(inner, ast.Subscript) or not isinstance(inner.slice, ast.Constant):
        raise NotImplementedError(ast.dump(node))
    if not isinstance(index, ast.Constant) or not isinstance(index.value, int):
        raise NotImplementedError(ast.dump(node))
    return shapes[str(inner.slice.value)][index.value]
