"""Convolutions by cut channels, like products: outputs stay cut, sums over cut inputs are completed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distensor.program.builder import Name
from distensor.program.partitioning.layout import Shard
from distensor.program.partitioning.rewriter import Loose, Rewriter
from distensor.program.partitioning.rules.base import Rule


def convolution(rewriter: Rewriter) -> None:
    """Input [rows, channels in, ...], weight [channels out, channels in, ...]; groups get whole values."""
    value, weight = rewriter.argument("input"), rewriter.argument("weight")
    shard, rows = rewriter.shard(weight), rewriter.shard(value)
    if rewriter.argument("groups") != 1 or len(rewriter.shape(value)) != len(rewriter.shape(weight)):
        rewriter.passed_on()
    elif shard is not None and shard.dim == 0:
        _outputs(rewriter, value, shard)
    elif shard is not None and shard.dim == 1:
        _inputs(rewriter, value, shard)
    elif shard is None and rows is not None and rows.dim == 0:
        extra = {
            key: rewriter.outside(rewriter.argument(key)) for key in ("weight", "bias") if key in rewriter.node.args
        }
        rewriter.keep({**rewriter.node.args, **extra}, rows)
    else:
        rewriter.passed_on()


def _outputs(rewriter: Rewriter, value: Name, shard: Shard) -> None:
    args: dict[str, Loose] = {**rewriter.node.args, "input": rewriter.outside(value)}
    bias = rewriter.argument("bias")
    if bias is not None:
        args["bias"] = rewriter.aligned(bias, shard)
    rewriter.keep(args, Shard(dim=1, layout=shard.layout))


def _inputs(rewriter: Rewriter, value: Name, shard: Shard) -> None:
    """Each rank's share of the sum over channels, and then the bias."""
    out, bias = rewriter.out(), rewriter.argument("bias")
    args: dict[str, Loose] = {**rewriter.node.args, "input": rewriter.aligned(value, shard)}
    args.pop("bias", None)
    partial = rewriter.one(rewriter.node.op, args, out)
    if bias is None:
        rewriter.reduced(partial, name=out.name)
        return
    total = rewriter.reduced(partial)
    column = _column(rewriter, rewriter.whole(bias), len(rewriter.shape(out)))
    rewriter.emit("aten.add.Tensor", {"self": total, "other": column}, rewriter.info[out], name=out.name)


def _column(rewriter: Rewriter, bias: Name, ndim: int) -> Name:
    """The bias along dim 1."""
    info = rewriter.info[bias]
    shape = (*info.shape, *(1 for _ in range(ndim - 2)))
    return rewriter.emit("aten.reshape.default", {"self": bias, "shape": shape}, replace(info, shape=shape))


def _pooling(windows: int) -> Rule:
    """Windows over the last dims; rows and channels stay cut."""

    def rule(rewriter: Rewriter) -> None:
        value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
        if shard is not None and shard.dim < len(rewriter.shape(value)) - windows:
            rewriter.keep(rewriter.node.args, shard)
        else:
            rewriter.passed_on()

    return rule


RULES: Mapping[str, Rule] = {
    **{f"aten.conv{dims}d.default": convolution for dims in (1, 2, 3)},
    **{f"aten.conv{dims}d.padding": convolution for dims in (1, 2)},
    "aten.max_pool1d.default": _pooling(1),
    "aten.avg_pool1d.default": _pooling(1),
    "aten.adaptive_avg_pool1d.default": _pooling(1),
    "aten.max_pool2d.default": _pooling(2),
    "aten.avg_pool2d.default": _pooling(2),
    "aten.adaptive_avg_pool2d.default": _pooling(2),
}
