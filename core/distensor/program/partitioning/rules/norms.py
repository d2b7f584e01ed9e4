"""Normalisations: along dims that are not cut each rank for itself, along a cut one with statistics of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distensor.program.builder import Info, Name
from distensor.program.partitioning.extents import times
from distensor.program.partitioning.layout import Shard
from distensor.program.partitioning.rewriter import Loose, Rewriter
from distensor.program.partitioning.rules.base import Rule
from distensor.program.partitioning.rules.reductions import divide
from distensor.program.values import DType

_HALVES = (DType.FLOAT16, DType.BFLOAT16)
_EPSILON = {DType.FLOAT32: 2.0**-23, DType.FLOAT64: 2.0**-52, DType.FLOAT16: 2.0**-10, DType.BFLOAT16: 2.0**-7}
"""What rms_norm adds where it is given no eps: the distance from 1 to the next number."""


def _norm(rewriter: Rewriter) -> None:
    """layer_norm and rms_norm over the last dims."""
    value = rewriter.argument("input")
    shard = rewriter.shard(value)
    extra = {key: rewriter.argument(key) for key in ("weight", "bias") if rewriter.argument(key) is not None}
    first = len(rewriter.shape(value)) - len(rewriter.argument("normalized_shape"))
    if shard is None:
        rewriter.passed_on()
    elif shard.dim < first:
        rewriter.keep({**rewriter.node.args, **{key: rewriter.outside(item) for key, item in extra.items()}}, shard)
    else:
        _over_cut(rewriter, value, shard, first, extra)


def _over_cut(rewriter: Rewriter, value: Name, shard: Shard, first: int, extra: Mapping[str, Name]) -> None:
    out = rewriter.out()
    done = rewriter.info[out]
    info = replace(done, dtype=DType.FLOAT32) if done.dtype in _HALVES else done
    if rewriter.info[value].dtype is not info.dtype:
        value = rewriter.emit("aten.to.dtype", {"self": value, "dtype": info.dtype.value}, info, shard)
    dims = tuple(range(first, len(info.shape)))
    if rewriter.node.op == "aten.layer_norm.default":
        mean = rewriter.entered(_mean(rewriter, value, info, dims))
        value = rewriter.emit("aten.sub.Tensor", {"self": value, "other": mean}, info, shard)
    squares = rewriter.emit("aten.square.default", {"self": value}, info, shard)
    variance = _mean(rewriter, squares, info, dims)
    eps = rewriter.argument("eps")
    shifted = {"self": variance, "other": _EPSILON[done.dtype] if eps is None else eps}
    root = rewriter.one("aten.rsqrt.default", {"self": rewriter.one("aten.add.Tensor", shifted, variance)}, variance)
    value = rewriter.emit("aten.mul.Tensor", {"self": value, "other": rewriter.entered(root)}, info, shard)
    for key, op in (("weight", "aten.mul.Tensor"), ("bias", "aten.add.Tensor")):
        if key in extra:
            own = rewriter.aligned(extra[key], Shard(dim=shard.dim - first, layout=shard.layout))
            value = rewriter.emit(op, {"self": value, "other": own}, info, shard)
    rewriter.emit("aten.to.dtype", {"self": value, "dtype": done.dtype.value}, done, shard, name=out.name)


def _mean(rewriter: Rewriter, value: Name, info: Info, dims: tuple[int, ...]) -> Name:
    kept = replace(info, shape=tuple(1 if at in dims else extent for at, extent in enumerate(info.shape)))
    args: dict[str, Loose] = {"self": value, "dim": dims, "keepdim": True}
    partial = rewriter.emit("aten.sum.dim_IntList", args, kept)
    return divide(rewriter, rewriter.reduced(partial), times(info.shape[dim] for dim in dims))


def group_norm(rewriter: Rewriter) -> None:
    """Rows may be cut; channels are not."""
    value = rewriter.argument("input")
    shard = rewriter.shard(value)
    if shard is None or shard.dim != 0:
        rewriter.passed_on()
        return
    extra = {key: rewriter.argument(key) for key in ("weight", "bias") if rewriter.argument(key) is not None}
    rewriter.keep({**rewriter.node.args, **{key: rewriter.outside(item) for key, item in extra.items()}}, shard)


RULES: Mapping[str, Rule] = {
    "aten.layer_norm.default": _norm,
    "aten.rms_norm.default": _norm,
    "aten.group_norm.default": group_norm,
}
