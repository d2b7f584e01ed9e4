"""Operations that move, merge or divide dims, or take parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distensor.program.context.extents import minus, over, plus, times
from distensor.program.context.layout import Layout, Same, Split
from distensor.program.context.pointwise import Rule, first_split, out_shape
from distensor.program.context.rewriter import Name, Rewriter, real
from distensor.program.expressions import Extent, Size
from distensor.program.values import Argument, Node, Ref, WeightRef


def subject(rw: Rewriter, node: Node, key: str = "self") -> tuple[Name, Split, tuple[Extent, ...]] | None:
    """The argument that the operation is about, how it is cut, and its full shape."""
    name = node.args.get(key)
    split = rw.split_of(name)
    if split is None or not isinstance(name, (Ref, WeightRef)):
        return None
    return name, split, rw.shape(name)


def axis_of(value: Argument, ndim: int) -> int:
    """A dim counted from the front."""
    assert isinstance(value, int)
    return value + ndim if value < 0 else value


# merging and dividing


def regrouped(rw: Rewriter, split: Split, shape: Sequence[Extent], result: Sequence[Extent]) -> Split | None:
    """Where the sequence is when `shape` is viewed as `result`: with the same elements before and after it."""
    before = times(*shape[: split.dim], split.outer)
    after = times(split.inner, *shape[split.dim + 1 :])
    for dim, extent in enumerate(result):
        found = _factored(rw, split.layout, extent, (before, times(*result[:dim])), (after, times(*result[dim + 1 :])))
        if found is not None:
            return Split(dim, split.layout, *found)
    return None


def _factored(
    rw: Rewriter, layout: Layout, extent: Extent, before: tuple[Extent, Extent], after: tuple[Extent, Extent]
) -> tuple[Extent, Extent] | None:
    """outer and inner with extent = outer x sequence x inner, where all dims before (after) have the same product."""
    outer, inner = (_quotient(rw, *pair) for pair in (before, after))
    if outer is None or inner is None or not rw.probes.same(times(outer, layout.length, inner), extent):
        return None
    return outer, inner


def _quotient(rw: Rewriter, extent: Extent, divisor: Extent) -> Extent | None:
    """extent / divisor where that is a whole number."""
    if rw.probes.same(extent, divisor):
        return 1
    pairs = list(zip(rw.probes.values(extent), rw.probes.values(divisor), strict=True))
    if any(below == 0 or above % below for above, below in pairs):
        return None
    constant = {above // below for above, below in pairs}
    return constant.pop() if len(constant) == 1 else over(extent, divisor)


def _view(rw: Rewriter, node: Node) -> bool:
    """Any view or copy with the same elements in the same order; the sizes of the result are spelled out."""
    found = subject(rw, node)
    if found is None:
        return False
    name, split, shape = found
    result = out_shape(rw, node)
    target = regrouped(rw, split, shape, result)
    if target is None:
        return False
    sizes = rw.local_shape(result, target)
    if node.op == "aten.view.default":
        rw.add(node, {"self": name, "size": sizes}, [target])
    else:
        rw.add(node, {"self": name, "shape": sizes}, [target], "aten.reshape.default")
    return True


def _expand(rw: Rewriter, node: Node) -> bool:
    found = subject(rw, node)
    if found is None:
        return False
    name, split, shape = found
    result = out_shape(rw, node)
    target = split.at(split.dim + len(result) - len(shape))
    rw.add(node, {"self": name, "size": rw.local_shape(result, target)}, [target], "aten.expand.default")
    return True


def _repeat(rw: Rewriter, node: Node) -> bool:
    found = subject(rw, node)
    repeats = node.args.get("repeats", node.args.get("dims"))
    if found is None or not isinstance(repeats, tuple):
        return False
    _, split, shape = found
    ndim = max(len(repeats), len(shape))
    target = split.at(split.dim + ndim - len(shape))
    place = target.dim - (ndim - len(repeats))
    if place >= 0 and repeats[place] != 1:
        return False
    rw.add(node, node.args, [target])
    return True


# moving


def _orders(node: Node, ndim: int) -> list[int] | None:
    """The dims of the operand in the order of the result."""
    order = list(range(ndim))
    name = node.op.split(".")[1]
    if name in ("transpose", "swapaxes", "swapdims"):
        keys = {"transpose": ("dim0", "dim1"), "swapaxes": ("axis0", "axis1"), "swapdims": ("dim0", "dim1")}[name]
        one, other = (axis_of(node.args[key], ndim) for key in keys)
        order[one], order[other] = other, one
    elif name == "permute":
        dims = node.args["dims"]
        assert isinstance(dims, tuple)
        order = [axis_of(dim, ndim) for dim in dims]
    elif name == "mT":
        order[-2:] = [ndim - 1, ndim - 2]
    elif name in ("t", "numpy_T"):
        order.reverse()
    else:
        return _moved(node, ndim)
    return order


def _moved(node: Node, ndim: int) -> list[int]:
    ends = [node.args[key] for key in ("source", "destination")]
    sources, places = ([axis_of(dim, ndim) for dim in (end if isinstance(end, tuple) else (end,))] for end in ends)
    order = [dim for dim in range(ndim) if dim not in sources]
    for place, source in sorted(zip(places, sources, strict=True)):
        order.insert(place, source)
    return order


def _permute(rw: Rewriter, node: Node) -> bool:
    found = subject(rw, node)
    order = None if found is None else _orders(node, len(found[2]))
    if found is None or order is None:
        return False
    rw.add(node, node.args, [found[1].at(order.index(found[1].dim))])
    return True


# along other dims


def _elsewhere(rw: Rewriter, node: Node) -> bool:
    """Operations along one or more dims (argument `dim`) which are not the cut one."""
    found = subject(rw, node)
    if found is None:
        return False
    _, split, shape = found
    dims = dims_of(node, len(shape))
    if split.dim in dims:
        return False
    rw.add(node, node.args, [_after(rw, node, index, split, shape, dims) for index in range(len(node.out))])
    return True


def _after(rw: Rewriter, node: Node, index: int, split: Split, shape: Sequence[Extent], dims: Sequence[int]) -> Split:
    """Where the cut dim is in a result: reduced dims may be gone."""
    used = next((name for name in (node.out[index], *node.out) if name is not None), None)
    gone = used is not None and len(rw.captured.values[used].shape) < len(shape)
    return split.at(split.dim - sum(dim < split.dim for dim in dims)) if gone else split


def dims_of(node: Node, ndim: int) -> tuple[int, ...]:
    """The dims that an operation works along; none given means all."""
    value = node.args.get("dim", node.args.get("dims", _DEFAULT_DIMS.get(node.op)))
    if value is None or value == ():
        return tuple(range(ndim))
    return tuple(axis_of(dim, ndim) for dim in (value if isinstance(value, tuple) else (value,)))


_DEFAULT_DIMS: Mapping[str, int] = {
    "aten.sort.default": -1,
    "aten.argsort.default": -1,
    "aten.topk.default": -1,
    "aten.glu.default": -1,
    "aten.split.Tensor": 0,
    "aten.split.sizes": 0,
    "aten.split_with_sizes.default": 0,
    "aten.chunk.default": 0,
    "aten.unbind.int": 0,
    "aten.tensor_split.sections": 0,
}


def _last_two(rw: Rewriter, node: Node) -> bool:
    """tril, triu: they compare places along the last two dims."""
    found = subject(rw, node)
    if found is None or found[1].dim >= len(found[2]) - 2:
        return False
    rw.add(node, node.args, [found[1]])
    return True


def _complex(rw: Rewriter, node: Node) -> bool:
    """A last dim of two comes or goes."""
    found = subject(rw, node)
    if found is None or found[1].dim >= min(len(found[2]), len(out_shape(rw, node))):
        return False
    rw.add(node, node.args, [found[1]])
    return True


def _joined(rw: Rewriter, node: Node) -> bool:
    """cat and stack along another dim."""
    parts = node.args["tensors"]
    assert isinstance(parts, tuple)
    names = [part for part in parts if isinstance(part, (Ref, WeightRef))]
    found = first_split(rw, names)
    if found is None:
        return False
    _, split = found
    ndim = len(out_shape(rw, node))
    dim = axis_of(node.args.get("dim", 0), ndim)
    stacked = node.op == "aten.stack.default"
    if not stacked and dim == split.dim:
        return False
    rw.add(
        node,
        {**node.args, "tensors": tuple(rw.cut(name, split) for name in names)},
        [split.at(split.dim + (stacked and dim <= split.dim))],
    )
    return True


def _padded(rw: Rewriter, node: Node) -> bool:
    found, pad = subject(rw, node), node.args["pad"]
    if found is None or not isinstance(pad, tuple):
        return False
    _, split, shape = found
    place = 2 * (len(shape) - 1 - split.dim)
    if any(amount != 0 for amount in pad[place : place + 2]):
        return False
    rw.add(node, node.args, [split])
    return True


def _repeat_interleave(rw: Rewriter, node: Node) -> bool:
    """Each element of a dim several times: of the sequence, each position."""
    found, repeats = subject(rw, node), node.args["repeats"]
    if found is None or not isinstance(repeats, (int, Size)):
        return False
    _, split, shape = found
    if node.args.get("dim") is None and len(shape) > 1:
        return False
    if axis_of(node.args.get("dim") or 0, len(shape)) == split.dim:
        split = replace(split, inner=times(split.inner, repeats))
    rw.add(node, {key: value for key, value in node.args.items() if key != "output_size"}, [split])
    return True


# parts


def _slice(rw: Rewriter, node: Node) -> bool:
    found = subject(rw, node)
    if found is None:
        return False
    name, split, shape = found
    if axis_of(node.args.get("dim", 0), len(shape)) != split.dim:
        rw.add(node, node.args, [split])
        return True
    if not split.is_plain or node.args.get("step", 1) != 1:
        return False
    length = out_shape(rw, node)[split.dim]
    start = _start(node.args.get("start"), split.layout.length)
    return start is not None and _window(rw, node, name, split, (start, plus(start, length)))


def _narrow(rw: Rewriter, node: Node) -> bool:
    """A slice by its length."""
    found = subject(rw, node)
    if found is not None and axis_of(node.args["dim"], len(found[2])) != found[1].dim:
        rw.add(node, node.args, [found[1]])
        return True
    args = {key: value for key, value in node.args.items() if key != "length"}
    return _slice(rw, Node(op="aten.slice.Tensor", args=args, out=node.out, module=node.module))


def _start(value: Argument, length: Extent) -> Extent | None:
    if value is None:
        return 0
    if isinstance(value, int):
        return value if value >= 0 else plus(length, value)
    return value if isinstance(value, Size) else None


def _window(rw: Rewriter, node: Node, name: Name, split: Split, bounds: tuple[Extent, Extent]) -> bool:
    """Positions of the sequence: each rank keeps what it holds of them."""
    start, stop = bounds
    if any(low > high for low, high in zip(rw.probes.values(stop), rw.probes.values(split.layout.length), strict=True)):
        return False
    whole = split.layout.length
    target = Split(split.dim, split.layout.window(start, whole if rw.probes.same(stop, whole) else stop))
    parts = [_part(rw, name, split, target, index, start) for index in _owned(rw, split)]
    rw.add(node, {"tensors": tuple(parts), "dim": split.dim}, [target], "aten.cat.default")
    return True


def _owned(rw: Rewriter, split: Split) -> list[int]:
    return [index for index, owner in enumerate(split.layout.owners) if owner == rw.rank]


def _part(rw: Rewriter, name: Name, split: Split, target: Split, index: int, start: Extent) -> Ref:
    """What remains of one chunk, by places in the rank's tensor."""
    owned = [at for at in _owned(rw, split) if at < index]
    place = plus(*(split.layout.lengths[at] for at in owned))
    low, high = (plus(target.layout.cuts[at], start) for at in (index, index + 1))
    first = plus(place, minus(low, split.layout.cuts[index]))
    length = minus(high, low)
    args: Mapping[str, Argument] = {"self": name, "dim": split.dim, "start": first, "end": plus(first, length)}
    info = rw.info(name)
    shape = (*info.shape[: split.dim], length, *info.shape[split.dim + 1 :])
    return rw.emit("aten.slice.Tensor", args, real(info, shape), Same.PARTIAL)


def _select(rw: Rewriter, node: Node) -> bool:
    found = subject(rw, node)
    if found is None:
        return False
    name, split, shape = found
    dim = axis_of(node.args["dim"], len(shape))
    if dim != split.dim:
        rw.add(node, node.args, [split.at(split.dim - (dim < split.dim))])
        return True
    start = _start(node.args["index"], split.layout.length)
    if start is None or not split.is_plain:
        return False
    return _one_position(rw, node, name, split, start)


def _one_position(rw: Rewriter, node: Node, name: Name, split: Split, start: Extent) -> bool:
    """A single position (the first or last token): only that is gathered."""
    target = Split(split.dim, split.layout.window(start, plus(start, 1)))
    parts = [_part(rw, name, split, target, index, start) for index in _owned(rw, split)]
    info = rw.info(name)
    one = real(info, (*info.shape[: split.dim], 1, *info.shape[split.dim + 1 :]))
    kept = rw.emit("aten.cat.default", {"tensors": tuple(parts), "dim": split.dim}, one, target)
    rw.add(node, {"self": rw.whole(kept), "dim": split.dim, "index": 0}, [Same.WHOLE])
    return True


# by index


def _embedding(rw: Rewriter, node: Node) -> bool:
    indices, weight = node.args["indices"], node.args["weight"]
    split = rw.split_of(indices)
    if split is None or not isinstance(weight, (Ref, WeightRef)):
        return False
    rw.add(node, {**node.args, "weight": rw.partial(weight)}, [split])
    return True


def _index(rw: Rewriter, node: Node) -> bool:
    """Rows of a table by one tensor of indices; or one list of places along another dim than the sequence."""
    table, indices = node.args["self"], node.args["indices"]
    if not isinstance(indices, tuple) or not isinstance(table, (Ref, WeightRef)):
        return False
    given = [(dim, index) for dim, index in enumerate(indices) if isinstance(index, (Ref, WeightRef))]
    if len(given) != 1:
        return False
    (dim, index), split = given[0], rw.split_of(table)
    if split is not None:
        return split.dim != dim and len(rw.shape(index)) == 1 and _places(rw, node, split, index)
    split = rw.split_of(index)
    if split is None or dim != 0:
        return False
    rw.add(node, {"self": rw.partial(table), "indices": indices}, [split])
    return True


def _places(rw: Rewriter, node: Node, split: Split, index: Name) -> bool:
    indices = node.args["indices"]
    assert isinstance(indices, tuple)
    shared = tuple(rw.partial(index) if item == index else item for item in indices)
    rw.add(node, {**node.args, "indices": shared}, [split])
    return True


def _pick(rw: Rewriter, node: Node) -> bool:
    """gather and take_along_dim along another dim: the index is cut as the values are."""
    index = node.args.get("index", node.args.get("indices"))
    value = node.args["self"]
    if node.args.get("dim") is None or not all(isinstance(item, (Ref, WeightRef)) for item in (index, value)):
        return False
    assert isinstance(index, (Ref, WeightRef))
    assert isinstance(value, (Ref, WeightRef))
    found = first_split(rw, [value, index])
    if found is None or axis_of(node.args["dim"], len(rw.shape(value))) == found[1].dim:
        return False
    split, shapes = found[1], (rw.shape(value), rw.shape(index))
    if len(shapes[0]) != len(shapes[1]) or not rw.probes.same(*(shape[split.dim] for shape in shapes)):
        return False
    key = "index" if "index" in node.args else "indices"
    rw.add(node, {**node.args, "self": rw.cut(value, split), key: rw.cut(index, split)}, [split])
    return True


def _collective(rw: Rewriter, node: Node) -> bool:
    """A collective of another axis along another dim."""
    found = subject(rw, node)
    if found is None or node.args["dim"] == found[1].dim:
        return False
    rw.add(node, node.args, [found[1]])
    return True


_VIEWS = "view reshape flatten.using_ints unflatten.int unsqueeze squeeze squeeze.dim squeeze.dims view_as reshape_as"
_MORE_VIEWS = "ravel atleast_1d atleast_2d"
_PERMUTES = "transpose.int permute movedim.int movedim.intlist swapaxes swapdims t mT numpy_T"
_ALONG = (
    "softmax.int log_softmax.int cumsum cumprod logsumexp amax amin max.dim min.dim argmax argmin prod.dim_int any.dim "
    "all.dim var.dim var.correction std.dim std.correction var_mean.correction norm.ScalarOpt_dim linalg_vector_norm "
    "sort argsort topk glu split.Tensor split.sizes split_with_sizes chunk unbind.int tensor_split.sections flip roll"
)


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": rule for name in names.split()}


SHAPING: Mapping[str, Rule] = {
    **_named(f"{_VIEWS} {_MORE_VIEWS}", _view),
    **_named("expand broadcast_to expand_as", _expand),
    **_named("repeat tile", _repeat),
    **_named(_PERMUTES, _permute),
    **_named(_ALONG, _elsewhere),
    **_named("tril triu", _last_two),
    **_named("view_as_real view_as_complex", _complex),
    **_named("cat concat stack", _joined),
    **_named("pad constant_pad_nd", _padded),
    **_named("repeat_interleave.self_int", _repeat_interleave),
    **_named("slice.Tensor", _slice),
    **_named("narrow", _narrow),
    **_named("select.int", _select),
    **_named("embedding", _embedding),
    **_named("index.Tensor", _index),
    **_named("gather take_along_dim", _pick),
    "dist.gather.default": _collective,
    "dist.split.default": _collective,
}
