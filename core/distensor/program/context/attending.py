"""Scaled dot-product attention whose queries, and perhaps keys and values, are cut."""

from __future__ import annotations

from collections.abc import Mapping

from distensor.core.compute import ContextAttention
from distensor.core.errors import ConfigError
from distensor.program.context.layout import Split
from distensor.program.context.pointwise import Rule
from distensor.program.context.rewriter import AXIS, Name, Rewriter, real
from distensor.program.values import Argument, Node, Ref, WeightRef

_ATTENTION = "dist.attention.default"


def _attention(rw: Rewriter, node: Node) -> bool:
    """Attention weights that are dropped at random are left to the whole sequence: there the numbers are those of one
    process.
    """
    query, key, value = (node.args[name] for name in ("query", "key", "value"))
    split = rw.split_of(query)
    if split is None or not split.is_plain or node.args.get("dropout_p", 0.0) != 0:
        return False
    ndim = len(rw.shape(query))
    if split.dim != ndim - 2:
        return _by_batch(rw, node, split)
    if any(rw.split_of(item) is not None for item in (key, value)):
        return _self_attention(rw, node, split)
    return _to_shared_keys(rw, node, split)


def _by_batch(rw: Rewriter, node: Node, split: Split) -> bool:
    """The sequence is a batch dim (attention over something else): keys and values are cut in the same way."""
    names = {key: node.args[key] for key in ("query", "key", "value")}
    shapes = {key: rw.shape(name) for key, name in names.items()}
    if split.dim >= len(shapes["query"]) - 2 or len({len(shape) for shape in shapes.values()}) > 1:
        return False
    if node.args.get("attn_mask") is not None or any(
        not rw.probes.same(shape[split.dim], split.extent) for shape in shapes.values()
    ):
        return False
    cut = {key: rw.cut(name, split) for key, name in names.items() if isinstance(name, (Ref, WeightRef))}
    rw.add(node, {**node.args, **cut}, [split])
    return True


def _to_shared_keys(rw: Rewriter, node: Node, split: Split) -> bool:
    """Cross attention: every rank has all keys; its queries are its own."""
    if node.args.get("is_causal"):
        return False
    shared = {key: rw.partial(_name(node.args[key])) for key in ("key", "value")}
    rw.add(node, {**node.args, **shared, "attn_mask": _rows(rw, node, split)}, [split])
    return True


def _name(value: Argument) -> Name:
    assert isinstance(value, (Ref, WeightRef))
    return value


def _rows(rw: Rewriter, node: Node, split: Split) -> Name | None:
    """The rows of the mask that belong to the queries here."""
    mask = node.args.get("attn_mask")
    if not isinstance(mask, (Ref, WeightRef)):
        return None
    shape = rw.shape(mask)
    if len(shape) < 2 or shape[-2] == 1:
        return rw.partial(mask)
    return rw.cut(mask, split.at(len(shape) - 2))


def _self_attention(rw: Rewriter, node: Node, split: Split) -> bool:
    names = {key: _name(node.args[key]) for key in ("query", "key", "value")}
    shapes = [rw.shape(name) for name in names.values()]
    mask = node.args.get("attn_mask")
    depth = len(rw.shape(mask)) if mask is not None else 2
    if {len(shape) for shape in shapes} not in ({3}, {4}) or not 2 <= depth <= len(shapes[0]):
        return False
    if not all(rw.probes.same(shape[0], shapes[0][0]) and rw.probes.same(shape[-2], split.extent) for shape in shapes):
        return _other_keys(rw, node, split)
    if len(shapes[0]) == 3 and not all(shape[0] == shapes[0][0] for shape in shapes):
        return False
    _check_heads(rw, node, shapes[0][1] if len(shapes[0]) == 4 else 1)
    cut = {key: rw.cut(name, split) for key, name in names.items()}
    args = {**cut, "attn_mask": _mask(rw, node, split), **_rules(rw, node, split)}
    _emit(rw, node, args, split)
    return True


def _other_keys(rw: Rewriter, node: Node, split: Split) -> bool:
    """Keys of another length, cut or not: they come together first."""
    return _to_shared_keys(rw, node, split)


def _rules(rw: Rewriter, node: Node, split: Split) -> Mapping[str, Argument]:
    return {
        "is_causal": bool(node.args.get("is_causal", False)),
        "scale": node.args.get("scale"),
        "lengths": split.layout.lengths,
        "owners": split.layout.owners,
        "method": rw.method,
        **AXIS,
    }


def _mask(rw: Rewriter, node: Node, split: Split) -> Name | None:
    """Ulysses has whole sequences of some heads, and so whole masks; the others have rows."""
    mask = node.args.get("attn_mask")
    if rw.method == ContextAttention.ULYSSES and isinstance(mask, (Ref, WeightRef)):
        return rw.partial(mask)
    return _rows(rw, node, split)


def _check_heads(rw: Rewriter, node: Node, heads: object) -> None:
    if rw.method == ContextAttention.ULYSSES and (not isinstance(heads, int) or heads < rw.ranks):
        raise ConfigError(
            f"context_attention='ulysses' gives each rank heads of its own: attention in {node.module!r} has {heads} "
            f"heads for context_parallel={rw.ranks}; use 'all_gather' or 'ring', or at most {heads} ranks"
        )


def _emit(rw: Rewriter, node: Node, args: Mapping[str, Argument], split: Split) -> None:
    """Three dims are one batch of heads."""
    if len(rw.shape(node.args["query"])) == 4:
        rw.add(node, args, [split], _ATTENTION)
        return
    opened = {key: _unsqueezed(rw, _name(args[key]), split) for key in ("query", "key", "value")}
    name = node.out[0]
    assert name is not None
    info = rw.captured.values[name]
    four = rw.emit(_ATTENTION, {**args, **opened}, real(info, (1, *info.shape)), split.at(2))
    rw.add(node, {"self": four, "dim": 0}, [split], "aten.squeeze.dim")


def _unsqueezed(rw: Rewriter, name: Name, split: Split) -> Ref:
    info = rw.info(name)
    return rw.emit("aten.unsqueeze.default", {"self": name, "dim": 0}, real(info, (1, *info.shape)), split.at(2))


ATTENDING: Mapping[str, Rule] = {"aten.scaled_dot_product_attention.default": _attention}
