"""A node as a call: the function of its operation and a flat list of arguments.

Shared by the shape check (on the meta device) and the runner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from distensor.core.parallel import Axis
from distensor.program.attention import ATTENTION
from distensor.program.axes import Groups
from distensor.program.collectives import COLLECTIVES
from distensor.program.draws import Draws
from distensor.program.expressions import Size, evaluate
from distensor.program.kernels import FACTORIES, KERNELS
from distensor.program.signatures import SIGNATURES, Kind, Parameter
from distensor.program.values import Argument, DType, Node, Ref, WeightRef

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT64: torch.float64,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.INT16: torch.int16,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
    DType.COMPLEX64: torch.complex64,
    DType.COMPLEX128: torch.complex128,
}
DTYPES: Mapping[torch.dtype, DType] = {there: here for here, there in TORCH_DTYPES.items()}

_FORMATS = {
    "contiguous": torch.contiguous_format,
    "preserve": torch.preserve_format,
    "channels_last": torch.channels_last,
}

Function: TypeAlias = Callable[..., Any]


class Call:
    """`function(*arguments)`: each argument is a reference, a size to evaluate, or ready for torch."""

    __slots__ = ("arguments", "function", "node")

    def __init__(self, node: Node, draws: Draws, device: torch.device, groups: Groups) -> None:
        self.node = node
        function = _function(node, draws, device, groups)
        positional, keywords = _split_arguments(node)
        if keywords and not any(isinstance(value, (Ref, WeightRef, Size, tuple)) for value in keywords.values()):
            function, keywords = functools.partial(function, **keywords), {}
        layout: list[int | None] = []
        flat: list[Any] = []
        for value in (*positional, *keywords.values()):
            grouped = isinstance(value, tuple) and any(isinstance(item, (Ref, WeightRef)) for item in value)
            layout.append(len(value) if grouped and isinstance(value, tuple) else None)
            flat.extend(value if grouped and isinstance(value, tuple) else (value,))
        self.arguments: tuple[Any, ...] = tuple(flat)
        self.function = _regroup(function, layout, tuple(keywords))


def _function(node: Node, draws: Draws, device: torch.device, groups: Groups) -> Function:
    collective = COLLECTIVES.get(node.op) or ATTENTION.get(node.op)
    if collective is not None:
        return functools.partial(collective, groups[Axis(str(node.args["axis"]))])
    drawing = draws.kernels.get(node.op)
    if drawing is not None:
        return functools.partial(drawing, node.site or 0)
    if node.op in FACTORIES:
        return functools.partial(KERNELS[node.op], device=device)
    return KERNELS[node.op]


def _split_arguments(node: Node) -> tuple[list[Any], dict[str, Any]]:
    """Positional ones up to the last that is given, keyword-only ones that are given."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    needed = 0
    for parameter in SIGNATURES[node.op].parameters:
        if parameter.name == "axis":
            continue  # chose the group
        given = parameter.name in node.args
        value = _ready(parameter, node.args[parameter.name]) if given else parameter.default
        if parameter.keyword_only:
            if given:
                keywords[parameter.name] = value
        else:
            positional.append(list(value) if isinstance(value, tuple) and not given else value)
            needed = len(positional) if given else needed
    return positional[:needed], keywords


def _ready(parameter: Parameter, value: Argument) -> Any:
    """Words become torch's objects; lists without references or sizes become lists."""
    if value is None:
        return None
    if parameter.kind is Kind.DTYPE:
        return TORCH_DTYPES[DType(str(value))]
    if parameter.kind is Kind.MEMORY_FORMAT:
        return _FORMATS[str(value)]
    if isinstance(value, tuple) and not any(isinstance(item, (Ref, WeightRef, Size)) for item in value):
        return list(value)
    return value


def _regroup(function: Function, layout: Sequence[int | None], keywords: tuple[str, ...]) -> Function:
    """A function of flat arguments: lists of tensors and keywords are put together again."""
    if all(length is None for length in layout) and not keywords:
        return function
    if len(layout) == 1 and not keywords:
        return lambda *flat: function(list(flat))
    if layout and layout[0] is not None and len(layout) == 2 and layout[1] is None and not keywords:
        return lambda *flat: function(flat[:-1], flat[-1])
    positional = len(layout) - len(keywords)

    def call(*flat: Any) -> Any:
        values: list[Any] = []
        start = 0
        for length in layout:
            values.append(flat[start] if length is None else list(flat[start : start + length]))
            start += 1 if length is None else length
        return function(*values[:positional], **dict(zip(keywords, values[positional:], strict=True)))

    return call


def resolve(value: Any, dims: Mapping[str, int]) -> Any:
    """Sizes (alone or in a list) as numbers."""
    if isinstance(value, Size):
        return evaluate(value, dims)
    if isinstance(value, tuple):
        return [evaluate(item, dims) if isinstance(item, Size) else item for item in value]
    return value
