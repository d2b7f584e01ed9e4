"""Symbolic sizes of torch.export as our expressions over named dims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from distensor.core.errors import CaptureError
from distensor.program.expressions import Extent, Size, Tree

_OPERATORS = {
    "Add": "+",
    "Mul": "*",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Max": "max",
    "Min": "min",
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "ToFloat": "float",
    "OpaqueUnaryFn_sqrt": "sqrt",
}


class SizeReader:
    """Turns SymInt and SymFloat into expressions; `dims` names the symbols of the batch."""

    def __init__(self) -> None:
        self.dims: dict[str, str] = {}

    def read(self, value: Any) -> Extent | float | bool:
        """A size (or real number made of sizes) as data."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value  # type: ignore[no-any-return]
        tree = self._tree(value.node.expr)
        return Size(tree) if isinstance(tree, (tuple, str)) else tree

    def _tree(self, expression: Any) -> Tree:
        if isinstance(expression, sympy.Symbol):
            return self._symbol(expression)
        if expression.is_Integer:
            return int(expression)
        if expression.is_number and not expression.free_symbols:
            return float(expression)
        name = type(expression).__name__
        if name in ("Pow", "PowByNatural"):
            return self._power(*expression.args)
        if name == "ModularIndexing":
            base, divisor, modulus = (self._tree(operand) for operand in expression.args)
            return ("%", ("//", base, divisor), modulus)
        if name not in _OPERATORS:
            raise CaptureError(f"a size of the module is {expression}: {name} of sizes is not supported")
        return (_OPERATORS[name], *(self._tree(operand) for operand in expression.args))

    def _power(self, base: Any, exponent: Any) -> Tree:
        if exponent == sympy.Rational(1, 2):
            return ("sqrt", self._tree(base))
        if not exponent.is_Integer or not 1 <= int(exponent) <= 8:
            raise CaptureError(f"a size of the module is {base}**{exponent}; only powers 1 to 8 are supported")
        tree = self._tree(base)
        return ("*", *([tree] * int(exponent))) if int(exponent) > 1 else tree

    def _symbol(self, symbol: sympy.Symbol) -> str:
        name = self.dims.get(str(symbol))
        if name is None:
            raise CaptureError(
                f"a size of the module ({symbol}) depends on the values of a tensor (nonzero, boolean index, item); "
                "a stage program needs sizes that follow from the shapes of the batch"
            )
        return name


def name_dims(shapes: Mapping[str, tuple[Any, ...]], reader: SizeReader) -> None:
    """Give every free symbol of the batch's shapes a name: batch, sequence, or <tensor>_<dim>."""
    taken: set[str] = set()
    for tensor, shape in shapes.items():
        for index, extent in enumerate(shape):
            if isinstance(extent, torch.SymInt) and isinstance(extent.node.expr, sympy.Symbol):
                symbol = str(extent.node.expr)
                if symbol not in reader.dims:
                    reader.dims[symbol] = _name(tensor, index, taken)
                    taken.add(reader.dims[symbol])


def _name(tensor: str, index: int, taken: set[str]) -> str:
    if index == 0:
        return "batch"
    if index == 1 and "sequence" not in taken:
        return "sequence"
    return f"{tensor}_{index}"
