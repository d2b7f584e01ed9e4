"""Sums, means and the like: over a cut dim each rank reduces its part, then all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from distensor.program.builder import Name
from distensor.program.expressions import Extent
from distensor.program.partitioning.extents import times
from distensor.program.partitioning.layout import Layout, Shard
from distensor.program.partitioning.rewriter import TENSOR_AXIS, Loose, Rewriter, normal_dim
from distensor.program.partitioning.rules.base import Rule


def _reduced_dims(rewriter: Rewriter, ndim: int) -> tuple[int, ...]:
    """The dims that the node at hand reduces; all where it names none."""
    dim = rewriter.argument("dim")
    if dim is None or dim == ():
        return tuple(range(ndim))
    return tuple(normal_dim(item, ndim) for item in (dim if isinstance(dim, tuple) else (dim,)))


def reduction(completed: Callable[[Rewriter, Name, Shard, tuple[int, ...]], bool] | None) -> Rule:
    """An operation over some dims. `completed` does it over a cut one and says whether it could."""

    def rule(rewriter: Rewriter) -> None:
        value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
        assert shard is not None
        dims = _reduced_dims(rewriter, len(rewriter.shape(value)))
        if shard.dim not in dims:
            before = 0 if rewriter.argument("keepdim") else sum(dim < shard.dim for dim in dims)
            rewriter.keep(rewriter.node.args, Shard(dim=shard.dim - before, layout=shard.layout))
        elif completed is None or not completed(rewriter, value, shard, dims):
            rewriter.passed_on()

    return rule


def _sum(rewriter: Rewriter, value: Name, shard: Shard, dims: tuple[int, ...]) -> bool:
    del value, shard, dims
    out = rewriter.out()
    partial = rewriter.one(rewriter.node.op, rewriter.node.args, out)
    rewriter.reduced(partial, name=out.name)
    return True


def _mean(rewriter: Rewriter, value: Name, shard: Shard, dims: tuple[int, ...]) -> bool:
    del shard
    out = rewriter.out()
    args = {**rewriter.node.args, "dim": dims}
    partial = rewriter.one("aten.sum.dim_IntList", args, out)
    divide(rewriter, rewriter.reduced(partial), times(rewriter.shape(value)[dim] for dim in dims), out.name)
    return True


def divide(rewriter: Rewriter, value: Name, count: Extent, name: str | None = None) -> Name:
    """A sum over `count` elements becomes their mean."""
    return rewriter.emit("aten.div.Tensor", {"self": value, "other": count}, rewriter.info[value], name=name)


def _amax(rewriter: Rewriter, value: Name, shard: Shard, dims: tuple[int, ...]) -> bool:
    """The largest of all has no gradient of its own here, so only values without one."""
    del dims
    if rewriter.info[value].requires_grad or not all_hold(rewriter, shard.layout):
        return False
    out = rewriter.out()
    partial = rewriter.one(rewriter.node.op, rewriter.node.args, out)
    rewriter.emit(
        "dist.maximum.default",
        {"self": partial, "axis": TENSOR_AXIS},
        rewriter.info[out],
        name=out.name,
    )
    return True


def all_hold(rewriter: Rewriter, layout: Layout) -> bool:
    """Whether every rank has a part: there is no largest of nothing."""
    return all(layout.held(rank) != 0 for rank in range(rewriter.size))


def exponentials(rewriter: Rewriter, value: Name, shard: Shard, dims: tuple[int, ...]) -> tuple[Name, Name, Name]:
    """(value - largest, its exponential summed over `dims` and the ranks, the largest); dims are kept as 1."""
    info = rewriter.info[value]
    small: tuple[Extent, ...] = tuple(1 if at in dims else extent for at, extent in enumerate(info.shape))
    kept = replace(info, shape=small)
    plain = replace(info, requires_grad=False)
    still = rewriter.emit("aten.detach.default", {"self": value}, plain, shard) if info.requires_grad else value
    fixed = replace(kept, requires_grad=False)
    own = rewriter.emit("aten.amax.default", {"self": still, "dim": dims, "keepdim": True}, fixed)
    largest = rewriter.largest(own)
    moved = rewriter.emit("aten.sub.Tensor", {"self": value, "other": largest}, info, shard)
    raised = rewriter.emit("aten.exp.default", {"self": moved}, info, shard)
    partial = rewriter.emit("aten.sum.dim_IntList", {"self": raised, "dim": dims, "keepdim": True}, kept)
    return moved, rewriter.reduced(partial), largest


def softmax(rewriter: Rewriter) -> None:
    """softmax and log_softmax over a cut dim."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    assert shard is not None
    dim = normal_dim(rewriter.argument("dim"), len(rewriter.shape(value)))
    if dim != shard.dim:
        rewriter.keep(rewriter.node.args, shard)
        return
    if not all_hold(rewriter, shard.layout):
        rewriter.passed_on()
        return
    out = rewriter.out()
    info = rewriter.info[out]
    if info.dtype is not rewriter.info[value].dtype:
        value = rewriter.emit("aten.to.dtype", {"self": value, "dtype": info.dtype.value}, info, shard)
    moved, total, _ = exponentials(rewriter, value, shard, (dim,))
    logarithm = rewriter.one("aten.log.default", {"self": total}, total)
    args: dict[str, Loose] = {"self": moved, "other": rewriter.entered(logarithm)}
    if rewriter.node.op == "aten.log_softmax.int":
        rewriter.emit("aten.sub.Tensor", args, info, shard, name=out.name)
        return
    logs = rewriter.emit("aten.sub.Tensor", args, info, shard)
    rewriter.emit("aten.exp.default", {"self": logs}, info, shard, name=out.name)


def _logsumexp(rewriter: Rewriter, value: Name, shard: Shard, dims: tuple[int, ...]) -> bool:
    if not all_hold(rewriter, shard.layout):
        return False
    out = rewriter.out()
    _, total, largest = exponentials(rewriter, value, shard, dims)
    logarithm = rewriter.one("aten.log.default", {"self": total}, total)
    whole = rewriter.one("aten.add.Tensor", {"self": logarithm, "other": largest}, total)
    rewriter.reshaped(whole, out.name, None)
    return True


_PLAIN = (
    "aten.prod.dim_int",
    "aten.amin.default",
    "aten.max.dim",
    "aten.min.dim",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.var.dim",
    "aten.var.correction",
    "aten.std.dim",
    "aten.std.correction",
    "aten.var_mean.correction",
    "aten.norm.ScalarOpt_dim",
    "aten.linalg_vector_norm.default",
    "aten.any.dim",
    "aten.all.dim",
)


def _ordered(rewriter: Rewriter) -> None:
    """cumsum, sort and topk: along dims that are not cut."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    assert shard is not None
    if normal_dim(rewriter.argument("dim"), len(rewriter.shape(value))) == shard.dim:
        rewriter.passed_on()
    else:
        rewriter.keep(rewriter.node.args, shard)


RULES: Mapping[str, Rule] = {
    "aten.sum.default": reduction(_sum),
    "aten.sum.dim_IntList": reduction(_sum),
    "aten.mean.default": reduction(_mean),
    "aten.mean.dim": reduction(_mean),
    "aten.amax.default": reduction(_amax),
    "aten.logsumexp.default": reduction(_logsumexp),
    **dict.fromkeys(_PLAIN, reduction(None)),
    "aten.softmax.int": softmax,
    "aten.log_softmax.int": softmax,
    "aten.cumsum.default": _ordered,
    "aten.cumprod.default": _ordered,
    "aten.sort.default": _ordered,
    "aten.argsort.default": _ordered,
    "aten.topk.default": _ordered,
}
