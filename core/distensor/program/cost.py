"""What one operation costs, before it runs: pieces it makes, elements it touches, multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from distensor.core.errors import ProgramRejectedError
from distensor.program.calls import resolve
from distensor.program.values import Limits, Node


def check_result_count(node: Node, tensors: Sequence[Tensor], dims: Mapping[str, int], limits: Limits) -> None:
    """Refuse a split into more pieces than the program names, before torch makes them."""
    count = _PIECES.get(node.op)
    if count is None:
        return
    pieces = count(node, tensors[0], dims)
    if pieces > limits.max_list or pieces < 0:
        raise ProgramRejectedError(
            f"{node.op} in {node.module!r} makes {pieces} pieces; the limit is {limits.max_list} (Limits.max_list)"
        )


def _number(node: Node, name: str, dims: Mapping[str, int], default: int = 0) -> int:
    return int(resolve(node.args.get(name, default), dims))


def _extent(value: Tensor, dim: int) -> int:
    return value.shape[dim] if -value.ndim <= dim < value.ndim else 0


def _split_pieces(node: Node, value: Tensor, dims: Mapping[str, int]) -> int:
    size = _number(node, "split_size", dims)
    extent = _extent(value, _number(node, "dim", dims))
    return -(-extent // size) if size > 0 else 0


def _unbind_pieces(node: Node, value: Tensor, dims: Mapping[str, int]) -> int:
    return _extent(value, _number(node, "dim", dims))


def _chunk_pieces(node: Node, value: Tensor, dims: Mapping[str, int]) -> int:
    del value
    return _number(node, "chunks", dims)


def _section_pieces(node: Node, value: Tensor, dims: Mapping[str, int]) -> int:
    del value
    return _number(node, "sections", dims)


_PIECES: Mapping[str, Callable[[Node, Tensor, Mapping[str, int]], int]] = {
    "aten.split.Tensor": _split_pieces,
    "aten.unbind.int": _unbind_pieces,
    "aten.chunk.default": _chunk_pieces,
    "aten.tensor_split.sections": _section_pieces,
}


def node_work(node: Node, tensors: Sequence[Tensor], results: Sequence[Any], dims: Mapping[str, int]) -> float:
    """Elements read and written (views of one element counted as large as they look) plus multiply-adds."""
    touched = float(sum(value.numel() for value in tensors) + sum(result.numel() for result in results))
    if not tensors or not results:
        return touched
    made = float(results[0].numel())
    name = node.op.split(".")[1]
    if name in ("linear", "matmul", "mm", "mv", "dot", "outer"):
        return touched + made * (tensors[0].shape[-1] if tensors[0].ndim else 1)
    if name in ("addmm", "bmm", "baddbmm"):
        return touched + made * tensors[-2].shape[-1]
    if name == "einsum":
        return touched + _equation_work(str(node.args["equation"]), tensors)
    if name.startswith("conv"):
        return touched + made * math.prod(tensors[1].shape[1:])
    if "pool" in name:
        return touched + made * math.prod(_kernel(node, tensors[0], results[0], dims))
    if name == "scaled_dot_product_attention":
        return touched + 2.0 * made * tensors[1].shape[-2]
    if name == "attention":  # over the keys of all ranks of its axis
        return touched + 2.0 * made * float(sum(resolve(node.args["lengths"], dims)))
    return touched


def _equation_work(equation: str, tensors: Sequence[Tensor]) -> float:
    """The product of the extents of all labels."""
    sides = equation.split("->")[0].split(",")
    extents = {
        label: extent
        for side, value in zip(sides, tensors, strict=False)
        for label, extent in zip(side, value.shape, strict=False)
    }
    return float(math.prod(extents.values()))


def _kernel(node: Node, value: Tensor, result: Tensor, dims: Mapping[str, int]) -> list[int]:
    """The window of a pooling; an adaptive one covers the input about once."""
    if "kernel_size" in node.args:
        window: list[int] = resolve(node.args["kernel_size"], dims)
        return window if len(window) > 1 else window * max(1, value.ndim - 2)
    return [max(1, value.numel() // max(1, result.numel()))]
