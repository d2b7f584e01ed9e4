"""Looking up rows and elements: vocabulary-parallel embedding, indices into dims that are not cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distensor.program.builder import Info, Name
from distensor.program.partitioning.layout import Layout, Shard
from distensor.program.partitioning.rewriter import Loose, Rewriter, normal_dim
from distensor.program.partitioning.rules.base import Rule
from distensor.program.values import DType


def owned_ranges(rewriter: Rewriter, layout: Layout) -> list[tuple[int, int]] | None:
    """(start, length) of each rank, where it is one range of numbers for all, else None."""
    if layout.outer != 1 or layout.inner != 1:
        return None
    found: dict[int, tuple[int, int]] = {}
    at = 0
    for length, owner in layout.segments:
        if not isinstance(length, int) or owner in found:
            return None
        found[owner] = (at, length)
        at += length
    return [found[rank] for rank in range(rewriter.size)] if len(found) == rewriter.size else None


def localised(rewriter: Rewriter, indices: Name, ranges: list[tuple[int, int]]) -> tuple[Name, Name]:
    """Indices into the own range (0 for those of other ranks), and which are not in it."""
    starts = rewriter.each(start for start, _ in ranges)
    lengths = rewriter.each(length for _, length in ranges)
    flags = replace(rewriter.info[indices], dtype=DType.BOOL)
    moved = rewriter.one("aten.sub.Tensor", {"self": indices, "other": starts}, indices)
    below = rewriter.emit("aten.lt.Scalar", {"self": moved, "other": 0}, flags)
    above = rewriter.emit("aten.ge.Scalar", {"self": moved, "other": lengths}, flags)
    foreign = rewriter.emit("aten.logical_or.default", {"self": below, "other": above}, flags)
    inside = rewriter.one("aten.masked_fill.Scalar", {"self": moved, "mask": foreign, "value": 0}, indices)
    return inside, foreign


def embedding(rewriter: Rewriter) -> None:
    """Columns stay cut; of cut rows (a part of the vocabulary) each rank looks up its own, and all are summed."""
    weight, indices = rewriter.argument("weight"), rewriter.argument("indices")
    shard, rows = rewriter.shard(weight), rewriter.shard(indices)
    if shard is None:
        if rows is None or rewriter.argument("scale_grad_by_freq"):
            rewriter.passed_on()
        else:
            rewriter.keep({**rewriter.node.args, "weight": rewriter.entered(weight)}, rows)
        return
    ranges = owned_ranges(rewriter, shard.layout)
    if shard.dim == 1:
        dim = len(rewriter.shape(rewriter.out())) - 1
        args = {**rewriter.node.args, "indices": rewriter.whole(indices)}
        rewriter.keep(args, Shard(dim=dim, layout=shard.layout))
    elif ranges is None or rewriter.argument("scale_grad_by_freq"):
        rewriter.passed_on()
    else:
        _of_vocabulary(rewriter, weight, rewriter.whole(indices), ranges)


def _of_vocabulary(rewriter: Rewriter, weight: Name, indices: Name, ranges: list[tuple[int, int]]) -> None:
    inside, foreign = localised(rewriter, indices, ranges)
    args: dict[str, Loose] = {"weight": weight, "indices": inside}
    padding = rewriter.argument("padding_idx")
    if padding >= 0:
        args["padding_idx"] = rewriter.each(
            padding - start if 0 <= padding - start < length else -1 for start, length in ranges
        )
    out = rewriter.out()
    found = rewriter.one("aten.embedding.default", args, out)
    flags = Info(dtype=DType.BOOL, shape=(*rewriter.shape(indices), 1), requires_grad=False)
    mask = rewriter.emit("aten.unsqueeze.default", {"self": foreign, "dim": -1}, flags)
    own = rewriter.one("aten.masked_fill.Scalar", {"self": found, "mask": mask, "value": 0}, out)
    rewriter.reduced(own, name=out.name)


def pick(rewriter: Rewriter) -> None:
    """gather: from a cut dim each rank picks what it has, and all are summed; along others it stays cut."""
    value, index = rewriter.argument("self"), rewriter.argument("index")
    shard = rewriter.shard(value)
    if shard is None:
        rewriter.passed_on()
        return
    dim = normal_dim(rewriter.argument("dim"), len(rewriter.shape(value)))
    ranges = owned_ranges(rewriter, shard.layout)
    if dim == shard.dim and ranges is not None and rewriter.info[value].dtype.is_floating:
        inside, foreign = localised(rewriter, rewriter.whole(index), ranges)
        found = rewriter.one("aten.gather.default", {"self": value, "dim": dim, "index": inside}, rewriter.out())
        masked = {"self": found, "mask": foreign, "value": 0}
        own = rewriter.one("aten.masked_fill.Scalar", masked, rewriter.out())
        rewriter.reduced(own, name=rewriter.out().name)
    elif dim != shard.dim and rewriter.shape(index)[shard.dim] == rewriter.shape(value)[shard.dim]:
        rewriter.keep({**rewriter.node.args, "index": rewriter.aligned(index, shard)}, shard)
    else:
        rewriter.passed_on()


def index(rewriter: Rewriter) -> None:
    """x[a, :, b]: dims without an index stay cut."""
    value, indices = rewriter.argument("self"), rewriter.argument("indices")
    shard = rewriter.shard(value)
    given = [at for at, item in enumerate(indices) if item is not None]
    if shard is None or shard.dim in given or any(rewriter.shard(item) is not None for item in indices):
        rewriter.passed_on()
        return
    width = max(len(rewriter.shape(indices[at])) for at in given)
    is_adjacent = given[-1] - given[0] + 1 == len(given)
    place = given[0] if is_adjacent else 0
    free = [dim for dim in range(len(rewriter.shape(value))) if dim not in given]
    at = free.index(shard.dim)
    dim = at if at < place else at + width
    rewriter.keep(rewriter.node.args, Shard(dim=dim, layout=shard.layout))


def select_rows(rewriter: Rewriter) -> None:
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    if shard is None or normal_dim(rewriter.argument("dim"), len(rewriter.shape(value))) == shard.dim:
        rewriter.passed_on()
        return
    rewriter.keep({**rewriter.node.args, "index": rewriter.whole(rewriter.argument("index"))}, shard)


RULES: Mapping[str, Rule] = {
    "aten.embedding.default": embedding,
    "aten.gather.default": pick,
    "aten.index.Tensor": index,
    "aten.index_select.default": select_rows,
}
