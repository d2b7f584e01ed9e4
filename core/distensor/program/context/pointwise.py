"""Operations that compute each element from elements at the same place, with broadcasting; and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from distensor.program.builder import Info
from distensor.program.context.layout import Same, Split
from distensor.program.context.rewriter import Name, Rewriter
from distensor.program.expressions import Extent
from distensor.program.values import Argument, Node, Ref, WeightRef

Rule: TypeAlias = Callable[[Rewriter, Node], bool]
"""Adds the node as this rank runs it; False where it cannot, and then the sequence is made whole for the node."""


def tensors(node: Node) -> list[tuple[str, Name]]:
    """The tensor arguments that stand alone, by name."""
    return [(key, value) for key, value in node.args.items() if isinstance(value, (Ref, WeightRef))]


def out_shape(rw: Rewriter, node: Node, index: int = 0) -> tuple[Extent, ...]:
    """The full shape of a result; () where it is not used."""
    name = node.out[index]
    return () if name is None else rw.captured.values[name].shape


def first_split(rw: Rewriter, names: Sequence[Name]) -> tuple[Name, Split] | None:
    found = ((name, rw.split_of(name)) for name in names)
    return next(((name, split) for name, split in found if split is not None), None)


def aligned(rw: Rewriter, name: Name, target: Split, ndim: int) -> Name:
    """An operand for a result of `ndim` dims that is cut as `target`: cut in the same way, or used by all as it is."""
    shape = rw.shape(name)
    dim = target.dim - (ndim - len(shape))
    if dim < 0 or shape[dim] == 1:
        return rw.partial(name)
    return rw.cut(name, target.at(dim))


def broadcast_target(rw: Rewriter, names: Sequence[Name], shape: Sequence[Extent]) -> Split | None:
    """How a result of `shape` is cut when these operands are broadcast to it."""
    found = first_split(rw, names)
    if found is None:
        return None
    name, split = found
    target = split.at(split.dim + len(shape) - len(rw.shape(name)))
    return target if rw.probes.same(shape[target.dim], split.extent) else None


def pointwise(rw: Rewriter, node: Node) -> bool:
    """Every tensor argument is broadcast against the others."""
    return _pointwise(rw, node, tensors(node))


def _pointwise(rw: Rewriter, node: Node, operands: Sequence[tuple[str, Name]]) -> bool:
    shape = out_shape(rw, node)
    target = broadcast_target(rw, [name for _, name in operands], shape)
    if target is None:
        return False
    args = {**node.args, **{key: aligned(rw, name, target, len(shape)) for key, name in operands}}
    rw.add(node, args, [target])
    return True


def _broadcast(rw: Rewriter, node: Node) -> bool:
    """Several tensors in the shape that they have together."""
    parts = node.args["tensors"]
    assert isinstance(parts, tuple)
    names = [part for part in parts if isinstance(part, (Ref, WeightRef))]
    shape = next(rw.captured.values[name].shape for name in node.out if name is not None)
    target = broadcast_target(rw, names, shape)
    if target is None:
        return False
    rw.add(node, {"tensors": tuple(aligned(rw, name, target, len(shape)) for name in names)}, [target] * len(names))
    return True


def _typed(rw: Rewriter, node: Node) -> bool:
    """`other` gives its dtype alone."""
    return _pointwise(rw, node, [pair for pair in tensors(node) if pair[0] != "other"])


def _dropout(rw: Rewriter, node: Node) -> bool:
    """The mask of one process is drawn by every rank, which keeps its part of it: the numbers are those of one."""
    value = node.args["input"]
    assert isinstance(value, Ref)
    return _dropped(rw, node, value, rw.info(value).shape)


def _feature_dropout(rw: Rewriter, node: Node) -> bool:
    value = node.args["input"]
    assert isinstance(value, Ref)
    shape = rw.info(value).shape
    return _dropped(rw, node, value, (*shape[:2], *(1 for _ in shape[2:])))


def _dropped(rw: Rewriter, node: Node, value: Ref, shape: tuple[Extent, ...]) -> bool:
    split = rw.split_of(value)
    if split is None:
        return False
    info = Info(dtype=rw.info(value).dtype, shape=shape, requires_grad=False)
    ones = rw.emit("aten.ones.default", {"size": shape, "dtype": info.dtype.value}, info, Same.WHOLE)
    mask = rw.emit(node.op, {**node.args, "input": ones}, info, Same.WHOLE, site=node.site)
    rw.add(node, {"self": value, "other": aligned(rw, mask, split, len(rw.info(value).shape))}, [split], _MULTIPLY)
    return True


_MULTIPLY = "aten.mul.Tensor"


def _random_like(rw: Rewriter, node: Node) -> bool:
    """As one process draws it, whole."""
    name = node.out[0]
    if name is None:
        return False
    info = rw.captured.values[name]
    args: Mapping[str, Argument] = {"size": info.shape, "dtype": info.dtype.value}
    rw.add(node, args, [Same.WHOLE], node.op.replace("_like", ""))
    return True


def _of_size(rw: Rewriter, node: Node) -> bool:
    """self.new_zeros(size) and the like: a whole constant; of self only the dtype matters."""
    rw.add(node, node.args, [Same.WHOLE])
    return True


_UNARY = (
    "abs neg exp expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan asin acos atan sinh cosh tanh "
    "sigmoid erf erfc floor ceil round trunc frac sign isnan isinf isfinite logical_not bitwise_not relu relu6 silu "
    "mish log_sigmoid hardswish hardsigmoid hardtanh gelu elu selu celu leaky_relu softplus positive logit sinc "
    "deg2rad isneginf isposinf threshold hardshrink softshrink nan_to_num maximum minimum atan2 logical_and "
    "logical_or logical_xor clamp clamp_min clamp_max addcmul addcdiv logaddexp hypot clip alias detach clone "
    "contiguous zeros_like ones_like full_like complex polar floor_divide"
)
_OVERLOADS = (
    "round.decimals add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar "
    "div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor floor_divide.Scalar remainder.Tensor "
    "remainder.Scalar fmod.Tensor fmod.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar max.other min.other "
    "eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor "
    "ge.Scalar bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor "
    "__and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor where.self where.ScalarOther "
    "where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor clamp.Tensor clamp_min.Tensor "
    "clamp_max.Tensor lerp.Scalar lerp.Tensor fill.Scalar fill.Tensor xlogy.Tensor to.dtype"
)
_OURS = ("dist.enter.default", "dist.reduce.default", "dist.once.default", "dist.maximum.default")

POINTWISE: Mapping[str, Rule] = {
    **{f"aten.{name}.default": pointwise for name in _UNARY.split()},
    **{f"aten.{name}": pointwise for name in _OVERLOADS.split()},
    **dict.fromkeys(_OURS, pointwise),
    "aten.broadcast_tensors.default": _broadcast,
    "aten.type_as.default": _typed,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.rand_like.default": _random_like,
    "aten.randn_like.default": _random_like,
    "aten.new_zeros.default": _of_size,
    "aten.new_ones.default": _of_size,
    "aten.new_full.default": _of_size,
}
