"""What the loss is a mean over, found from the graph.

The last stage gives the loss of its rows and the number of elements it is the mean of, so that
sum(weight * loss) / sum(weight) over micro-batches is exactly the loss of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from distensor.core.errors import CaptureError
from distensor.program.builder import GraphBuilder, Info
from distensor.program.expressions import Extent, Size, degree, names
from distensor.program.ops import ELEMENTWISE_LOSSES, TARGET_LOSSES
from distensor.program.values import Argument, DType, Node, Ref, WeightRef, sizes_in

LossWeight: TypeAlias = "Literal['rows'] | Callable[[Any], Any] | None"
BATCH_DIM = "batch"


@dataclass(frozen=True, slots=True)
class Count:
    """A mean over a number of elements that follows from the shapes."""

    extent: Extent


@dataclass(frozen=True, slots=True)
class Tokens:
    """A mean over the targets that are not ignored (weighted by class, if there are class weights)."""

    target: Ref
    ignore_index: int
    class_weight: Ref | WeightRef | None


@dataclass(frozen=True, slots=True)
class Quotient:
    """A sum divided by this sum of the batch."""

    denominator: Ref


Weight: TypeAlias = "Count | Tokens | Quotient"


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over rows (or tokens, or elements) with this weight."""

    weight: Weight


@dataclass(frozen=True, slots=True)
class Neutral:
    """The same for every batch: constants, terms of parameters alone."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds up over the rows."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing can be said. `node` is where the search ended."""

    node: Node | None


Finding: TypeAlias = "Mean | Neutral | Sum | Unknown"

_THROUGH = frozenset(
    {
        "aten.neg.default",
        "aten.to.dtype",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.view.default",
        "aten.reshape.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.unsqueeze.default",
        "aten.detach.default",
    }
)
_SCALING = frozenset(
    {"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"}
)
_ADDING = frozenset({"aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar"})
_SUMS = frozenset({"aten.sum.default", "aten.sum.dim_IntList"})
_MEANS = frozenset({"aten.mean.default", "aten.mean.dim"})
_FLOORS = frozenset({"aten.clamp.default", "aten.clamp_min.default", "aten.clip.default"})
_MEAN, _SUM = 1, 2


def find_weight(builder: GraphBuilder, loss: Ref, given: Literal["rows"] | Ref | None) -> Ref:
    """The value that counts what `loss` is the mean over; found, or as the user says.

    A mean over targets becomes sum / max(count, 1) in the graph: rows without any target give zero, not nan.

    Raises:
        CaptureError: the loss is not provably a mean over the batch.
    """
    if isinstance(given, Ref):
        return given
    if given == "rows":
        return _emit_count(builder, Size(BATCH_DIM))
    if given is not None:
        raise CaptureError(f"loss_weight={given!r}: expected None, 'rows' or callable(batch) -> number of elements")
    analysis = _Analysis(builder)
    finding = analysis.find(loss)
    if isinstance(finding, Mean):
        if isinstance(finding.weight, Tokens):
            return _protect(builder, analysis, finding.weight)
        if isinstance(finding.weight, Quotient):
            return finding.weight.denominator
        return _emit_count(builder, finding.weight.extent)
    raise CaptureError(_explain(finding))


def _explain(finding: Finding) -> str:
    advice = (
        "pass loss_weight='rows' if it is the mean over rows, or loss_weight=callable(batch) that counts its elements"
    )
    if isinstance(finding, Sum):
        return (
            "the loss is a sum over the batch (perhaps divided by a number from outside, as num_items_in_batch is); "
            "micro-batches need a mean: leave num_items_in_batch out, use reduction='mean', or " + advice
        )
    if isinstance(finding, Neutral):
        return "the loss does not depend on the batch"
    where = (
        f" (it ends in {finding.node.op} in module {finding.node.module!r})"
        if isinstance(finding, Unknown) and finding.node
        else ""
    )
    return f"what the loss is the mean over cannot be found{where}; {advice}"


@dataclass(slots=True)
class _Analysis:
    builder: GraphBuilder
    _makers: dict[str, Node] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)
    """A value -> the first one that was computed in the same way."""
    _moving: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        inputs = {name for name in self.builder.values if not name.startswith("%")}
        self._moving.update(inputs)
        seen: dict[Any, Node] = {}
        for node in self.builder.nodes:
            self._number(node, seen)
            self._makers.update({name: node for name in node.out if name is not None})
            if self._depends(node):
                self._moving.update(name for name in node.out if name is not None)

    def _number(self, node: Node, seen: dict[Any, Node]) -> None:
        if node.site is not None:
            return
        same = seen.setdefault((node.op, *((key, self.first(value)) for key, value in node.args.items())), node)
        for name, first in zip(node.out, same.out, strict=True):
            if name is not None and first is not None:
                self._first[name] = first

    def first(self, value: Argument) -> Argument:
        """The same argument by the names of the first values that are equal to it."""
        if isinstance(value, Ref):
            return Ref(self._first.get(value.name, value.name))
        return tuple(self.first(item) for item in value) if isinstance(value, tuple) else value

    def _depends(self, node: Node) -> bool:
        if any(isinstance(reference, Ref) and reference.name in self._moving for reference in node.references()):
            return True
        sizes = [size for value in node.args.values() for size in sizes_in(value)]
        return any(BATCH_DIM in names(size) for size in sizes)

    def _is_neutral(self, value: Argument) -> bool:
        if isinstance(value, Ref):
            return value.name not in self._moving
        return not (isinstance(value, Size) and BATCH_DIM in names(value))

    def find(self, value: Argument, depth: int = 0) -> Finding:
        if self._is_neutral(value):
            return Neutral()
        node = self._makers.get(value.name) if isinstance(value, Ref) else None
        if node is None or depth > 200:
            return Unknown(node)
        rule = self._rule(node.op)
        return Unknown(node) if rule is None else rule(node, depth + 1)

    def _rule(self, op: str) -> Callable[[Node, int], Finding] | None:
        rules: Sequence[tuple[frozenset[str], Callable[[Node, int], Finding]]] = (
            (TARGET_LOSSES, self._target_loss),
            (ELEMENTWISE_LOSSES, self._elementwise_loss),
            (_MEANS, self._mean),
            (_SUMS, self._sum),
            (_THROUGH, self._through),
            (_SCALING, self._scaling),
            (_ADDING, self._adding),
        )
        return next((rule for ops, rule in rules if op in ops), None)

    def _target_loss(self, node: Node, depth: int) -> Finding:
        del depth
        reduction = node.args.get("reduction", _MEAN)
        target, weight = self.first(node.args["target"]), node.args.get("weight")
        logits = node.args["self"]
        if reduction == _SUM:
            return Sum()
        if reduction != _MEAN or not isinstance(target, Ref) or not isinstance(logits, Ref):
            return Unknown(node)
        if self.builder.info(target).dtype.is_floating:
            shape = self.builder.info(logits).shape
            classes = 1 if len(shape) > 1 else 0
            return self._count(node, [extent for index, extent in enumerate(shape) if index != classes])
        ignore = node.args.get("ignore_index", -100)
        assert isinstance(ignore, int)
        return Mean(Tokens(target, ignore, weight if isinstance(weight, (Ref, WeightRef)) else None))

    def _elementwise_loss(self, node: Node, depth: int) -> Finding:
        del depth
        reduction = node.args.get("reduction", _MEAN)
        if reduction == _SUM:
            return Sum()
        shapes = [self._shape(node.args[key]) for key in ("self", "target")]
        return self._count(node, max(shapes, key=len)) if reduction == _MEAN else Unknown(node)

    def _shape(self, value: Argument) -> Sequence[Extent]:
        return self.builder.info(value).shape if isinstance(value, (Ref, WeightRef)) else ()

    def _count(self, node: Node, shape: Sequence[Extent]) -> Finding:
        extent = product(shape)
        return Mean(Count(extent)) if degree(extent, BATCH_DIM) == 1 else Unknown(node)

    def _mean(self, node: Node, depth: int) -> Finding:
        shape = self._shape(node.args["self"])
        if len(shape) == 0 or all(extent == 1 for extent in shape):
            return self.find(node.args["self"], depth)
        return self._count(node, shape) if _is_scalar(self.builder, node) else Unknown(node)

    def _sum(self, node: Node, depth: int) -> Finding:
        shape = self._shape(node.args["self"])
        if all(extent == 1 for extent in shape):
            return self.find(node.args["self"], depth)
        whole = _is_scalar(self.builder, node) and degree(product(shape), BATCH_DIM) == 1
        return Sum() if whole else Unknown(node)

    def _through(self, node: Node, depth: int) -> Finding:
        return self.find(node.args["self"], depth)

    def _scaling(self, node: Node, depth: int) -> Finding:
        first, second = node.args["self"], node.args["other"]
        if self._is_neutral(second):
            return self.find(first, depth)
        if node.op.startswith("aten.mul"):
            return self.find(second, depth) if self._is_neutral(first) else Unknown(node)
        if not isinstance(self.find(first, depth), Sum):
            return Unknown(node)
        return self._quotient(node, second, depth)

    def _quotient(self, node: Node, denominator: Argument, depth: int) -> Finding:
        if isinstance(denominator, Size):
            return Mean(Count(denominator)) if degree(denominator, BATCH_DIM) == 1 else Unknown(node)
        count = self._without_floor(denominator)
        if isinstance(count, Ref) and not self.builder.info(count).requires_grad and self.find(count, depth) == Sum():
            return Mean(Quotient(count))
        return Sum() if isinstance(count, Ref) and count.name not in self._makers else Unknown(node)

    def _without_floor(self, value: Argument) -> Argument:
        """mask.sum().clamp(min=1) counts as mask.sum(): where it is zero, so is the sum that it divides."""
        node = self._makers.get(value.name) if isinstance(value, Ref) else None
        if node is None or node.op not in _FLOORS or node.args.get("max") is not None:
            return value
        low = node.args.get("min")
        return node.args["self"] if isinstance(low, (int, float)) and low <= 1 else value

    def _adding(self, node: Node, depth: int) -> Finding:
        found = [self.find(node.args[key], depth) for key in ("self", "other")]
        kept = [finding for finding in found if not isinstance(finding, Neutral)]
        if len(kept) == 1:
            return kept[0] if isinstance(kept[0], (Mean, Unknown)) else Unknown(node)
        return kept[0] if kept[0] == kept[1] and isinstance(kept[0], (Mean, Sum)) else Unknown(node)


def product(shape: Sequence[Extent]) -> Extent:
    """The number of elements as one expression."""
    fixed = math.prod(extent for extent in shape if isinstance(extent, int))
    moving = [extent.tree for extent in shape if isinstance(extent, Size)]
    if not moving:
        return fixed
    if fixed == 1 and len(moving) == 1:
        return Size(moving[0])
    return Size(("*", *moving, *([fixed] if fixed != 1 else [])))


def _is_scalar(builder: GraphBuilder, node: Node) -> bool:
    name = node.out[0]
    return name is not None and all(extent == 1 for extent in builder.values[name].shape)


_SCALAR = Info(dtype=DType.INT64, shape=(), requires_grad=False)


def _emit_count(builder: GraphBuilder, extent: Extent) -> Ref:
    args: Mapping[str, Argument] = {"s": extent, "dtype": DType.INT64.value}
    return builder.emit_one("aten.scalar_tensor.default", args, _SCALAR, "weight")


def _protect(builder: GraphBuilder, analysis: _Analysis, tokens: Tokens) -> Ref:
    """Count the targets before the losses over them, and divide the sums of those losses by it."""
    first = next(index for index, node in enumerate(builder.nodes) if _is_mean_over(node, analysis, tokens))
    later = builder.nodes[first:]
    del builder.nodes[first:]
    weight = _emit_tokens(builder, tokens)
    floor = builder.emit_one("aten.clamp_min.default", {"self": weight, "min": 1}, builder.info(weight), "divisor")
    for node in later:
        if _is_mean_over(node, analysis, tokens):
            _emit_divided(builder, node, floor if tokens.class_weight is None else weight)
        else:
            builder.nodes.append(node)
    return weight


def _is_mean_over(node: Node, analysis: _Analysis, tokens: Tokens) -> bool:
    if node.op not in TARGET_LOSSES or node.args.get("reduction", _MEAN) != _MEAN:
        return False
    same = (
        analysis.first(node.args["target"]) == tokens.target
        and node.args.get("ignore_index", -100) == tokens.ignore_index
    )
    return same and node.args.get("weight") == tokens.class_weight


def _emit_divided(builder: GraphBuilder, node: Node, divisor: Ref) -> None:
    (name,) = node.out
    assert name is not None
    builder.module = node.module
    args = {**node.args, "reduction": _SUM}
    total = builder.emit_one(node.op, args, builder.values[name], name.lstrip("%"))
    args = {"self": total, "other": divisor}
    builder.nodes.append(Node(op="aten.div.Tensor", args=args, out=(name,), module=node.module))


def _emit_tokens(builder: GraphBuilder, tokens: Tokens) -> Ref:
    shape = builder.info(tokens.target).shape
    mask = Info(dtype=DType.BOOL, shape=shape, requires_grad=False)
    kept = builder.emit_one("aten.ne.Scalar", {"self": tokens.target, "other": tokens.ignore_index}, mask, "counted")
    if tokens.class_weight is None:
        return builder.emit_one("aten.sum.default", {"self": kept}, _SCALAR, "weight")
    return _emit_class_weights(builder, tokens, kept)


def _emit_class_weights(builder: GraphBuilder, tokens: Tokens, kept: Ref) -> Ref:
    """sum of class_weight[target] over the targets that count."""
    assert tokens.class_weight is not None
    target = builder.info(tokens.target)
    dtype = builder.info(tokens.class_weight).dtype
    safe = builder.emit_one("aten.mul.Tensor", {"self": tokens.target, "other": kept}, target, "safe")
    each = Info(dtype=dtype, shape=target.shape, requires_grad=False)
    weights = builder.emit_one("aten.index.Tensor", {"self": tokens.class_weight, "indices": (safe,)}, each, "weights")
    counted = builder.emit_one("aten.mul.Tensor", {"self": weights, "other": kept}, each, "weights")
    scalar = Info(dtype=dtype, shape=(), requires_grad=False)
    return builder.emit_one("aten.sum.default", {"self": counted}, scalar, "weight")
