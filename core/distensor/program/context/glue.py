"""Masks: values without gradient that have the sequence twice are made for the rows of a rank, not cut from all."""

from __future__ import annotations

from distensor.program.context.layout import Same, Split
from distensor.program.context.pointwise import POINTWISE, aligned, pointwise, tensors
from distensor.program.context.rewriter import Rewriter
from distensor.program.expressions import names
from distensor.program.values import Node, Ref

_EXPANDS = frozenset({"aten.expand.default", "aten.broadcast_to.default"})


def remade(rw: Rewriter, name: Ref, split: Split) -> Ref | None:
    """The part of a value that `split` says, computed from parts; None where it has to be cut from the whole.

    So a causal mask takes length x length / P on each rank; the whole one, unless something else uses it, is not made.
    """
    node = rw.makers.get(name.name)
    if node is None or len(node.out) != 1 or not _has_it_twice(rw, name) or not _is_plain(rw, node):
        return None
    info = rw.info(name)
    args = {**node.args, **{key: aligned(rw, item, split, len(info.shape)) for key, item in tensors(node)}}
    if node.op in _EXPANDS:
        args = {"self": args["self"], "size": rw.local_shape(info.shape, split)}
    elif POINTWISE.get(node.op) is not pointwise:
        return None
    return rw.emit("aten.expand.default" if node.op in _EXPANDS else node.op, args, info, split)


def _has_it_twice(rw: Rewriter, name: Ref) -> bool:
    sequence = next(names(rw.layout.length))
    return sum(sequence in names(extent) for extent in rw.shape(name)) >= 2


def _is_plain(rw: Rewriter, node: Node) -> bool:
    """Nothing with a gradient, nothing that is cut already."""
    return all(rw.state(item) is Same.WHOLE and not rw.info(item).requires_grad for item in node.references())
