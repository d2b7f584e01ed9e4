"""Losses over cut values: cross entropy over a cut vocabulary without gathering it, sums over cut rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum

from distensor.program.builder import Name
from distensor.program.expressions import Extent
from distensor.program.ops import ELEMENTWISE_LOSSES
from distensor.program.partitioning.extents import times
from distensor.program.partitioning.layout import Shard
from distensor.program.partitioning.rewriter import TENSOR_AXIS, Loose, Rewriter
from distensor.program.partitioning.rules.base import Rule, broadcast, is_one, lead, over, tensors
from distensor.program.partitioning.rules.indexing import localised, owned_ranges
from distensor.program.partitioning.rules.reductions import all_hold, divide
from distensor.program.values import DType


class _Mode(IntEnum):
    """torch's numbers for what becomes of the losses of single elements."""

    NONE = 0
    MEAN = 1
    SUM = 2


def cross_entropy(rewriter: Rewriter) -> None:
    """Classes are dim 1, or dim 0 of a single row; all other dims are rows."""
    logits, target = rewriter.argument("self"), rewriter.argument("target")
    shard = rewriter.shard(logits)
    classes = 1 if len(rewriter.shape(logits)) > 1 else 0
    if shard is None or rewriter.info[target].dtype.is_floating:
        rewriter.passed_on()
    elif shard.dim == classes:
        _over_classes(rewriter, shard, classes)
    else:
        _over_rows(rewriter, shard, shard.dim - (shard.dim > classes))


def _over_classes(rewriter: Rewriter, shard: Shard, classes: int) -> None:
    ranges = owned_ranges(rewriter, shard.layout)
    extent = rewriter.shape(rewriter.argument("self"))[classes]
    if ranges is None or not all_hold(rewriter, shard.layout) or not isinstance(extent, int):
        rewriter.passed_on()
        return
    args: dict[str, Loose] = {**rewriter.node.args, "target": rewriter.whole(rewriter.argument("target"))}
    weight = rewriter.argument("weight")
    if weight is not None:
        args["weight"] = rewriter.whole(weight)
    own: dict[str, Loose] = {
        "classes": extent,
        "start": rewriter.each(start for start, _ in ranges),
        "axis": TENSOR_AXIS,
    }
    rewriter.keep({**args, **own}, None, op="dist.cross_entropy.default")


def likelihood(rewriter: Rewriter) -> None:
    """nll_loss of cut log-probabilities: each rank picks the targets that it has, and all are summed."""
    value, target = rewriter.argument("self"), rewriter.argument("target")
    shard = rewriter.shard(value)
    classes = 1 if len(rewriter.shape(value)) > 1 else 0
    ranges = None if shard is None else owned_ranges(rewriter, shard.layout)
    if shard is None or shard.dim != classes or ranges is None or rewriter.argument("weight") is not None:
        rewriter.passed_on()
        return
    target = rewriter.whole(target)
    ignored, picked = _picked(rewriter, value, target, classes, ranges)
    losses = rewriter.one("aten.masked_fill.Scalar", {"self": picked, "mask": ignored, "value": 0}, picked)
    out, mode = rewriter.out(), rewriter.argument("reduction")
    if mode == _Mode.NONE:
        rewriter.emit("aten.neg.default", {"self": losses}, rewriter.info[out], name=out.name)
        return
    negative = rewriter.one("aten.neg.default", {"self": losses}, losses)
    if mode == _Mode.SUM:
        rewriter.emit("aten.sum.default", {"self": negative}, rewriter.info[out], name=out.name)
        return
    counted = rewriter.one("aten.logical_not.default", {"self": ignored}, ignored)
    number = replace(rewriter.info[target], shape=())
    count = rewriter.emit("aten.sum.default", {"self": counted}, number)
    added = rewriter.one("aten.sum.default", {"self": negative}, out)
    rewriter.emit("aten.div.Tensor", {"self": added, "other": count}, rewriter.info[out], name=out.name)


def _picked(
    rewriter: Rewriter, value: Name, target: Name, classes: int, ranges: list[tuple[int, int]]
) -> tuple[Name, Name]:
    """(which targets are ignored, the log-probability of each target, whole on every rank)."""
    flags = replace(rewriter.info[target], dtype=DType.BOOL)
    ignored = rewriter.emit("aten.eq.Scalar", {"self": target, "other": rewriter.argument("ignore_index")}, flags)
    inside, foreign = localised(rewriter, target, ranges)
    shape = list(rewriter.shape(target))
    shape.insert(classes, 1)
    opened = replace(rewriter.info[target], shape=tuple(shape))
    index = rewriter.emit("aten.unsqueeze.default", {"self": inside, "dim": classes}, opened)
    info = replace(rewriter.info[value], shape=tuple(shape))
    found = rewriter.emit("aten.gather.default", {"self": value, "dim": classes, "index": index}, info)
    rows = replace(info, shape=rewriter.shape(target))
    closed = rewriter.emit("aten.squeeze.dim", {"self": found, "dim": classes}, rows)
    own = rewriter.emit("aten.masked_fill.Scalar", {"self": closed, "mask": foreign, "value": 0}, rows)
    return ignored, rewriter.reduced(own)


def _over_rows(rewriter: Rewriter, shard: Shard, row: int) -> None:
    """Sums over cut rows are completed; other means need the number of rows that count and get whole values."""
    if rewriter.argument("reduction") == _Mode.MEAN:
        rewriter.passed_on()
        return
    target = rewriter.aligned(rewriter.argument("target"), Shard(dim=row, layout=shard.layout))
    args: dict[str, Loose] = {**rewriter.node.args, "target": target}
    if rewriter.argument("weight") is not None:
        args["weight"] = rewriter.outside(rewriter.argument("weight"))
    if rewriter.argument("reduction") == _Mode.NONE:
        rewriter.keep(args, Shard(dim=row, layout=shard.layout))
        return
    out = rewriter.out()
    rewriter.reduced(rewriter.one(rewriter.node.op, args, out), name=out.name)


def elementwise_loss(rewriter: Rewriter) -> None:
    """A loss of single elements and their sum or mean."""
    names = list(tensors(tuple(rewriter.node.args.values())))
    shape = _broadcast_shape(rewriter, names)
    shard = lead(rewriter, iter(names), shape)
    if shard is None:
        rewriter.passed_on()
        return
    args = {
        key: over(value, lambda name: broadcast(rewriter, name, shape, shard))
        for key, value in rewriter.node.args.items()
    }
    mode = rewriter.argument("reduction")
    if mode == _Mode.NONE:
        rewriter.keep(args, shard)
        return
    out = rewriter.out()
    partial = rewriter.one(rewriter.node.op, {**args, "reduction": int(_Mode.SUM)}, out)
    if mode == _Mode.SUM:
        rewriter.reduced(partial, name=out.name)
    else:
        divide(rewriter, rewriter.reduced(partial), times(shape), out.name)


def _broadcast_shape(rewriter: Rewriter, names: list[Name]) -> tuple[Extent, ...]:
    shapes = [rewriter.shape(name) for name in names]
    shape: list[Extent] = [1] * max(map(len, shapes))
    for own in shapes:
        for at, extent in enumerate(reversed(own)):
            if not is_one(extent):
                shape[-1 - at] = extent
    return tuple(shape)


RULES: Mapping[str, Rule] = {
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.nll_loss.default": likelihood,
    "aten.nll_loss_nd.default": likelihood,
    **dict.fromkeys(ELEMENTWISE_LOSSES, elementwise_loss),
}
