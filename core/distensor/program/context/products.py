"""Matrix products: dims are labels, as in einsum, and the label of the sequence decides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distensor.program.context.layout import Split
from distensor.program.context.pointwise import Rule, out_shape
from distensor.program.context.rewriter import Name, Rewriter
from distensor.program.values import Argument, Node, Ref, WeightRef


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor with a label for each of its dims."""

    key: str
    name: Name
    labels: str

    def dim(self, rw: Rewriter, label: str) -> int | None:
        """Where the label is; a dim of one that is broadcast does not count."""
        dim = self.labels.find(label)
        return None if dim < 0 or rw.shape(self.name)[dim] == 1 else dim


def _operand(node: Node, key: str, labels: str) -> Operand | None:
    name = node.args.get(key)
    return Operand(key, name, labels) if isinstance(name, (Ref, WeightRef)) else None


def contract(rw: Rewriter, node: Node, operands: Sequence[Operand], result: str) -> Mapping[str, Name] | None:
    """The operands as this rank needs them for a result that is cut; None where it is not cut by any of them.

    A label of the result decides: who has it is cut along it, who has not is needed whole. So queries stay cut and
    keys come together.
    """
    found = _deciding(rw, operands, result)
    if found is None:
        return None
    label, split = found
    return {operand.key: _along(rw, operand, label, split) for operand in operands}


def _deciding(rw: Rewriter, operands: Sequence[Operand], result: str) -> tuple[str, Split] | None:
    for operand in operands:
        split = rw.split_of(operand.name)
        if split is not None and operand.labels[split.dim] in result:
            return operand.labels[split.dim], split
    return None


def _along(rw: Rewriter, operand: Operand, label: str, split: Split) -> Name:
    dim = operand.dim(rw, label)
    return rw.partial(operand.name) if dim is None else rw.cut(operand.name, split.at(dim))


def _summed(rw: Rewriter, operands: Sequence[Operand]) -> Mapping[str, Name] | None:
    """The operands for a product that sums over the sequence: each rank sums over what it holds."""
    for operand in operands:
        split = rw.split_of(operand.name)
        if split is not None:
            label = operand.labels[split.dim]
            if all(other.dim(rw, label) is not None for other in operands):
                return {other.key: _along(rw, other, label, split) for other in operands}
    return None


def product(rw: Rewriter, node: Node, operands: Sequence[Operand], result: str, added: str | None = None) -> bool:
    """A product with these labels; `added` names an argument that is broadcast and added to the result."""
    names = contract(rw, node, operands, result)
    if names is not None:
        found = _deciding(rw, operands, result)
        assert found is not None
        target = found[1].at(result.index(found[0]))
        rw.add(node, {**node.args, **names, **_added(rw, node, added, target, len(result))}, [target])
        return True
    names = _summed(rw, operands)
    if names is None or (added is not None and node.args.get(added) is not None):
        return False
    _reduce(rw, node, {**node.args, **names})
    return True


def _reduce(rw: Rewriter, node: Node, args: Mapping[str, Argument]) -> None:
    total = rw.reduced(node.op, args, node)
    rw.rename(node, total)


def _added(rw: Rewriter, node: Node, key: str | None, target: Split, ndim: int) -> Mapping[str, Name]:
    name = node.args.get(key) if key is not None else None
    if key is None or not isinstance(name, (Ref, WeightRef)):
        return {}
    shape = rw.shape(name)
    dim = target.dim - (ndim - len(shape))
    return {key: rw.partial(name) if dim < 0 or shape[dim] == 1 else rw.cut(name, target.at(dim))}


_LETTERS = "abcdefghijklmnopqrstuvw"


def _linear(rw: Rewriter, node: Node) -> bool:
    rows = _LETTERS[: len(rw.shape(node.args["input"])) - 1]
    operands = [_operand(node, "input", f"{rows}x"), _operand(node, "weight", "yx")]
    return product(rw, node, [item for item in operands if item is not None], f"{rows}y", "bias")


def _matmul(rw: Rewriter, node: Node) -> bool:
    shapes = [rw.shape(node.args[key]) for key in ("self", "other")]
    ndim = max(map(len, shapes))
    batch = _LETTERS[: max(ndim - 2, 0)]
    labels = [_side(batch, len(shape), index) for index, shape in enumerate(shapes)]
    result = batch + ("x" if len(shapes[0]) > 1 else "") + ("z" if len(shapes[1]) > 1 else "")
    operands = [_operand(node, key, label) for key, label in zip(("self", "other"), labels, strict=True)]
    return product(rw, node, [item for item in operands if item is not None], result)


def _side(batch: str, ndim: int, index: int) -> str:
    """Labels of the left (0) or right (1) factor of a matrix product."""
    if ndim == 1:
        return "y"
    return batch[len(batch) - (ndim - 2) :] + ("xy" if index == 0 else "yz")


def _fixed(keys: Sequence[str], labels: Sequence[str], result: str, added: str | None = None) -> Rule:
    def rule(rw: Rewriter, node: Node) -> bool:
        operands = [_operand(node, key, label) for key, label in zip(keys, labels, strict=True)]
        return product(rw, node, [item for item in operands if item is not None], result, added)

    return rule


_EQUATION = re.compile(r"([a-zA-Z]+(?:,[a-zA-Z]+)*)->([a-zA-Z]*)")


def _einsum(rw: Rewriter, node: Node) -> bool:
    equation = _EQUATION.fullmatch(str(node.args["equation"]).replace(" ", ""))
    tensors = node.args["tensors"]
    if equation is None or not isinstance(tensors, tuple):
        return False
    sides = equation[1].split(",")
    if any(len(set(side)) < len(side) for side in sides):
        return False
    operands = [
        Operand(str(index), name, side)
        for index, (name, side) in enumerate(zip(tensors, sides, strict=True))
        if isinstance(name, (Ref, WeightRef))
    ]
    return _einsum_of(rw, node, operands, equation[2])


def _einsum_of(rw: Rewriter, node: Node, operands: Sequence[Operand], result: str) -> bool:
    names = contract(rw, node, operands, result)
    if names is None:
        names = _summed(rw, operands)
        if names is not None:
            _reduce(rw, node, {**node.args, "tensors": tuple(names.values())})
        return names is not None
    found = _deciding(rw, operands, result)
    assert found is not None
    target = found[1].at(result.index(found[0]))
    assert len(out_shape(rw, node)) == len(result)
    rw.add(node, {**node.args, "tensors": tuple(names.values())}, [target])
    return True


PRODUCTS: Mapping[str, Rule] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _matmul,
    "aten.mm.default": _fixed(("self", "mat2"), ("xy", "yz"), "xz"),
    "aten.bmm.default": _fixed(("self", "mat2"), ("bxy", "byz"), "bxz"),
    "aten.mv.default": _fixed(("self", "vec"), ("xy", "y"), "x"),
    "aten.dot.default": _fixed(("self", "tensor"), ("x", "x"), ""),
    "aten.outer.default": _fixed(("self", "vec2"), ("x", "y"), "xy"),
    "aten.addmm.default": _fixed(("mat1", "mat2"), ("xy", "yz"), "xz", "self"),
    "aten.baddbmm.default": _fixed(("batch1", "batch2"), ("bxy", "byz"), "bxz", "self"),
    "aten.einsum.default": _einsum,
}
