"""Sums and means over the sequence, normalisations, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distensor.program.builder import Info
from distensor.program.context.extents import times
from distensor.program.context.layout import Same, Split
from distensor.program.context.pointwise import Rule, aligned, broadcast_target, tensors
from distensor.program.context.rewriter import Rewriter, real
from distensor.program.context.shaping import axis_of, dims_of, subject
from distensor.program.expressions import Extent
from distensor.program.ops import ELEMENTWISE_LOSSES, TARGET_LOSSES
from distensor.program.values import Argument, DType, Node, Ref, WeightRef

_NONE, _MEAN, _SUM = 0, 1, 2


def _sum(rw: Rewriter, node: Node) -> bool:
    return _total(rw, node, mean=False)


def _mean(rw: Rewriter, node: Node) -> bool:
    return _total(rw, node, mean=True)


def _total(rw: Rewriter, node: Node, *, mean: bool) -> bool:
    """A sum over the sequence is the sum of the ranks' sums; a mean is divided by the full count."""
    found = subject(rw, node)
    if found is None:
        return False
    _, split, shape = found
    dims = dims_of(node, len(shape))
    if split.dim not in dims:
        kept = bool(node.args.get("keepdim"))
        rw.add(node, node.args, [split if kept else split.at(split.dim - sum(dim < split.dim for dim in dims))])
        return True
    op = node.op.replace("aten.mean.default", "aten.sum.default").replace("aten.mean.dim", "aten.sum.dim_IntList")
    total = rw.reduced(op, node.args, node)
    _finish(rw, node, total, times(*(shape[dim] for dim in dims)) if mean else 1)
    return True


def _finish(rw: Rewriter, node: Node, total: Ref, count: Extent) -> None:
    """The result of the node: a total, divided by a count."""
    if count == 1:
        rw.rename(node, total)
        return
    name = node.out[0]
    assert name is not None
    dtype = rw.captured.values[name].dtype
    info = Info(dtype=dtype, shape=(), requires_grad=False)
    divisor = rw.emit("aten.scalar_tensor.default", {"s": count, "dtype": dtype.value}, info, Same.WHOLE)
    rw.add(node, {"self": total, "other": divisor}, [Same.WHOLE], "aten.div.Tensor")


def _normalised(rw: Rewriter, node: Node) -> bool:
    """layer_norm and rms_norm over dims behind the sequence."""
    found, over = subject(rw, node, "input"), node.args["normalized_shape"]
    if found is None or not isinstance(over, tuple) or found[1].dim >= len(found[2]) - len(over):
        return False
    rw.add(node, {**node.args, **_shared(rw, node, "weight", "bias")}, [found[1]])
    return True


def _shared(rw: Rewriter, node: Node, *keys: str) -> Mapping[str, Argument]:
    """Arguments that every rank needs whole."""
    given = ((key, node.args.get(key)) for key in keys)
    return {key: rw.partial(value) for key, value in given if isinstance(value, (Ref, WeightRef))}


def _similarity(rw: Rewriter, node: Node) -> bool:
    """cosine_similarity: two tensors compared along one dim, which goes."""
    operands = tensors(node)
    shapes = [rw.shape(name) for _, name in operands]
    if len({len(shape) for shape in shapes}) != 1:
        return False
    ndim = len(shapes[0])
    target = broadcast_target(rw, [name for _, name in operands], max(shapes, key=len))
    dim = axis_of(node.args.get("dim", 1), ndim)
    if target is None or target.dim == dim:
        return False
    args = {key: aligned(rw, name, target, ndim) for key, name in operands}
    rw.add(node, {**node.args, **args}, [target.at(target.dim - (dim < target.dim))])
    return True


# losses


def _elementwise_loss(rw: Rewriter, node: Node) -> bool:
    """Losses of each element alone, perhaps summed or averaged over all."""
    operands = tensors(node)
    shape = max((rw.shape(name) for _, name in operands), key=len)
    target = broadcast_target(rw, [name for _, name in operands], shape)
    reduction = node.args.get("reduction", _MEAN)
    if target is None or not all(_fits(rw, rw.shape(name), shape) for _, name in operands):
        return False
    args = {**node.args, **{key: aligned(rw, name, target, len(shape)) for key, name in operands}}
    if reduction == _NONE:
        rw.add(node, args, [target])
        return True
    total = rw.reduced(node.op, {**args, "reduction": _SUM}, node)
    _finish(rw, node, total, times(*shape) if reduction == _MEAN else 1)
    return True


def _fits(rw: Rewriter, shape: Sequence[Extent], whole: Sequence[Extent]) -> bool:
    """Whether `whole` is what `shape` is broadcast to."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return all(extent == 1 or rw.probes.same(extent, other) for extent, other in pairs)


def _target_loss(rw: Rewriter, node: Node) -> bool:
    """cross_entropy and nll, also over classes that another axis cuts."""
    logits, target = node.args["self"], node.args["target"]
    if not isinstance(logits, (Ref, WeightRef)) or not isinstance(target, (Ref, WeightRef)):
        return False
    split = rw.split_of(logits)
    shape = rw.shape(logits)
    classes = 1 if len(shape) > 1 else 0
    if split is None or split.dim == classes:
        return False
    by_index = not rw.info(target).dtype.is_floating
    place = split.at(split.dim - (classes < split.dim)) if by_index else split
    args = {**node.args, "target": rw.cut(target, place), **_shared(rw, node, "weight")}
    reduction = node.args.get("reduction", _MEAN)
    if reduction == _NONE:
        rw.add(node, args, [split.at(split.dim - (classes < split.dim))])
        return True
    if reduction == _SUM:
        rw.rename(node, rw.reduced(node.op, args, node))
        return True
    return _mean_target_loss(rw, node, args, split, (target, classes))


def _mean_target_loss(
    rw: Rewriter, node: Node, args: Mapping[str, Argument], split: Split, of: tuple[Ref | WeightRef, int]
) -> bool:
    """The mean over targets that are not ignored; means weighted by class are left to the whole sequence."""
    target, classes = of
    if node.args.get("weight") is not None:
        return False
    total = rw.reduced(node.op, {**args, "reduction": _SUM}, node)
    if rw.info(target).dtype.is_floating:
        shape = rw.shape(target)
        _finish(rw, node, total, times(*shape[:classes], *shape[classes + 1 :]))
        return True
    whole = rw.whole(target)
    mask = real(Info(dtype=DType.BOOL, shape=rw.shape(target), requires_grad=False), rw.shape(target))
    ignored = node.args.get("ignore_index", -100)
    kept = rw.emit("aten.ne.Scalar", {"self": whole, "other": ignored}, mask, Same.WHOLE)
    scalar = Info(dtype=DType.INT64, shape=(), requires_grad=False)
    count = rw.emit("aten.sum.default", {"self": kept}, scalar, Same.WHOLE)
    rw.add(node, {"self": total, "other": count}, [Same.WHOLE], "aten.div.Tensor")
    return True


REDUCING: Mapping[str, Rule] = {
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.layer_norm.default": _normalised,
    "aten.rms_norm.default": _normalised,
    "aten.cosine_similarity.default": _similarity,
    **dict.fromkeys(ELEMENTWISE_LOSSES, _elementwise_loss),
    **dict.fromkeys(TARGET_LOSSES, _target_loss),
    "dist.cross_entropy.default": _target_loss,
}
