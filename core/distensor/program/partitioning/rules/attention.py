"""Attention with cut heads (or rows): each rank attends with the heads it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distensor.program.builder import Name
from distensor.program.expressions import Extent
from distensor.program.partitioning.extents import divided, times
from distensor.program.partitioning.layout import Layout, Shard
from distensor.program.partitioning.rewriter import Loose, Rewriter
from distensor.program.partitioning.rules.base import Rule, broadcast
from distensor.program.values import Ref, WeightRef


def attention(rewriter: Rewriter) -> None:
    """scaled_dot_product_attention with queries, keys and values of [..., heads, sequence, width]."""
    names = {key: rewriter.argument(key) for key in ("query", "key", "value")}
    ndim = len(rewriter.shape(names["query"]))
    found = next((shard for shard in map(rewriter.shard, names.values()) if shard and shard.dim < ndim - 2), None)
    if found is None:
        rewriter.passed_on()
        return
    repeats = _repeats(rewriter, names)
    if found.dim == ndim - 3 and repeats != 1:
        _grouped(rewriter, names, repeats)
        return
    made = {key: rewriter.aligned(name, found) for key, name in names.items()}
    _attend(rewriter, made, found)


def _repeats(rewriter: Rewriter, names: Mapping[str, Name]) -> int:
    """Query heads for each head of keys and values."""
    if not rewriter.argument("enable_gqa"):
        return 1
    ratio = divided(rewriter.shape(names["query"])[-3], rewriter.shape(names["key"])[-3])
    return ratio if isinstance(ratio, int) else 1


def _grouped(rewriter: Rewriter, names: Mapping[str, Name], repeats: int) -> None:
    """Fewer heads of keys and values: cut like the queries where possible, else each is repeated first."""
    dim = len(rewriter.shape(names["query"])) - 3
    query, key = rewriter.shard(names["query"]), rewriter.shard(names["key"])
    lead = key if key is not None and key.dim == dim else None
    if lead is not None:
        wide = Shard(dim=dim, layout=_wider(lead.layout, repeats))
        if query is None or query.dim != dim or query.layout == wide.layout:
            wide = wide if query is None else Shard(dim=dim, layout=wide.layout.joined(query.layout))
            made = {name: rewriter.aligned(names[name], lead) for name in ("key", "value")}
            _attend(rewriter, {"query": rewriter.aligned(names["query"], wide), **made}, wide)
            return
        rewriter.plans.agree(query.layout, wide.layout)
    if query is None or query.dim != dim:
        rewriter.passed_on()
        return
    made = {name: rewriter.aligned(_repeated(rewriter, names[name], dim, repeats), query) for name in ("key", "value")}
    _attend(rewriter, {"query": names["query"], **made}, query)


def _wider(layout: Layout, repeats: int) -> Layout:
    return Layout.of(layout.segments, layout.outer, times((layout.inner, repeats)), layout.origins)


def _repeated(rewriter: Rewriter, name: Name, dim: int, repeats: int) -> Name:
    """Every head several times, one after the other."""
    whole = rewriter.whole(name)
    shape: tuple[Extent, ...] = rewriter.shape(whole)
    info = replace(rewriter.info[whole], shape=(*shape[:dim], times((shape[dim], repeats)), *shape[dim + 1 :]))
    return rewriter.emit("aten.repeat_interleave.self_int", {"self": whole, "repeats": repeats, "dim": dim}, info)


def _attend(rewriter: Rewriter, made: Mapping[str, Name], shard: Shard) -> None:
    args: dict[str, Loose] = {**rewriter.node.args, **made}
    mask = args.get("attn_mask")
    if isinstance(mask, (Ref, WeightRef)):
        shape = (*rewriter.shape(rewriter.out())[:-1], rewriter.shape(made["key"])[-2])
        args["attn_mask"] = broadcast(rewriter, mask, shape, shard)
    rewriter.keep(args, shard)


RULES: Mapping[str, Rule] = {"aten.scaled_dot_product_attention.default": attention}
