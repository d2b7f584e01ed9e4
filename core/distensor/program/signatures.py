"""The operation table, parsed: which arguments an operation takes and how many results it gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from distensor.program.ops import OPERATIONS


class Kind(StrEnum):
    """What one argument (or one entry of a list) may be."""

    TENSOR = "T"
    TENSOR_OR_NUMBER = "A"
    INTEGER = "i"
    NUMBER = "s"
    REAL = "f"
    BOOLEAN = "b"
    DTYPE = "d"
    WORD = "e"
    EQUATION = "q"
    MEMORY_FORMAT = "m"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One argument of an operation."""

    name: str
    kind: Kind
    is_list: bool
    optional: bool
    """Whether None may be given."""
    optional_items: bool
    required: bool
    default: object
    keyword_only: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One operation. `results` None means a list whose length depends on the arguments."""

    name: str
    parameters: tuple[Parameter, ...]
    results: int | None

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


_LINE = re.compile(r"(?P<name>[\w.]+)\((?P<parameters>.*)\) -> (?P<results>.*)")
_PARAMETER = re.compile(
    r"(?P<kind>[A-Za-z])(?P<item>\?(?=\*))?(?P<list>\*)?(?P<none>\?)? (?P<name>\w+)(?:=(?P<default>.*))?"
)
_COMMA = re.compile(r", (?![^\[]*\])")


def parse(line: str) -> Signature:
    """One line of the table.

    >>> parse("aten.add.Tensor(T self, A other, *, s alpha=1) -> T").parameters[2].default
    1
    """
    match = _LINE.fullmatch(line)
    assert match is not None, f"not a signature: {line}"
    parameters: list[Parameter] = []
    keyword_only = False
    for text in _COMMA.split(match["parameters"]):
        if text == "*":
            keyword_only = True
        else:
            parameters.append(_parse_parameter(text, keyword_only))
    results = None if match["results"] == "T*" else match["results"].count("T")
    return Signature(name=match["name"], parameters=tuple(parameters), results=results)


def _parse_parameter(text: str, keyword_only: bool) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    assert match is not None, f"not a parameter: {text}"
    default = match["default"]
    return Parameter(
        name=match["name"],
        kind=Kind(match["kind"]),
        is_list=match["list"] is not None,
        optional=match["none"] is not None,
        optional_items=match["item"] is not None,
        required=default is None,
        default=None if default is None else _parse_default(default),
        keyword_only=keyword_only,
    )


def _parse_default(text: str) -> object:
    if text in ("none", "valid", "constant", "contiguous"):
        return text
    value = ast.literal_eval(text)
    return tuple(value) if isinstance(value, list) else value


SIGNATURES: Mapping[str, Signature] = {
    signature.name: signature
    for signature in (parse(line) for line in OPERATIONS.splitlines() if line and not line.startswith("#"))
}
