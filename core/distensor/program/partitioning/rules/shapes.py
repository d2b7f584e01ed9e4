"""Views, permutations, slices and joins of cut values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from distensor.program.builder import Name
from distensor.program.expressions import Extent
from distensor.program.partitioning.extents import times
from distensor.program.partitioning.layout import Layout, Need, Shard, cropped, seen, sliceable, views
from distensor.program.partitioning.rewriter import Loose, Rewriter, normal_dim
from distensor.program.partitioning.rules.base import Rule, following, lead


def _cut_input(rewriter: Rewriter, key: str = "self") -> tuple[Name, Shard] | None:
    value = rewriter.argument(key)
    shard = rewriter.shard(value)
    return None if shard is None else (value, shard)


# Views


def view(rewriter: Rewriter) -> None:
    """The same elements under another shape."""
    found = _cut_input(rewriter)
    out = rewriter.out()
    if found is None:
        rewriter.passed_on()
        return
    value, shard = found
    made = _viewed(rewriter, rewriter.shape(value), shard, rewriter.shape(out))
    if made is None:
        rewriter.reshaped(rewriter.whole(value), out.name, None)
    else:
        rewriter.reshaped(value, out.name, made)


def _viewed(rewriter: Rewriter, shape: Sequence[Extent], shard: Shard, made: Sequence[Extent]) -> Shard | None:
    """How the view is cut. Asks for another cut of the weights where this one does not fit, None if none does."""
    needs = views(shape, shard, made)
    for need in needs:
        layout = seen(shard.layout, need)
        if layout is not None:
            return Shard(dim=need.dim, layout=layout)
    _ask_for_units(rewriter, shard.layout, needs)
    trouble = _too_few(rewriter, shard.layout, needs)
    _ask_for_blocks(rewriter, shard.layout, needs, trouble)
    if trouble is not None:
        rewriter.plans.problems[trouble] = None
    return None


def _ask_for_units(rewriter: Rewriter, layout: Layout, needs: Sequence[Need]) -> None:
    for need in needs:
        has_blocks = seen(layout, replace(need, unit=1)) is not None
        if has_blocks and rewriter.plans.can_use_unit(layout, need.unit):
            rewriter.plans.use_unit(layout, need.unit)


def _too_few(rewriter: Rewriter, layout: Layout, needs: Sequence[Need]) -> str | None:
    """What to say where a weight has fewer units than ranks."""
    for need in sorted(needs, key=lambda need: need.unit):
        if layout.origins and need.unit > 1 and not rewriter.plans.can_use_unit(layout, need.unit):
            return rewriter.plans.too_few(layout, need.unit, rewriter.node.module)
    return None


def _ask_for_blocks(rewriter: Rewriter, layout: Layout, needs: Sequence[Need], trouble: str | None) -> None:
    total = sliceable(layout)
    for need in needs:
        if total is None or need.repeats == 1 or total % need.repeats:
            continue
        block = total // need.repeats
        positions = range(block, total, block)
        if rewriter.plans.can_cut(layout, positions, need.unit):
            rewriter.plans.use_cuts(layout, positions, trouble)


def expand(rewriter: Rewriter) -> None:
    value, out = rewriter.argument("self"), rewriter.out()
    shard = rewriter.shard(value)
    shape = rewriter.shape(out)
    if shard is not None:
        dim = shard.dim + len(shape) - len(rewriter.shape(value))
        if rewriter.shape(value)[shard.dim] != shape[dim]:
            value, shard = rewriter.whole(value), None
        else:
            shard = Shard(dim=dim, layout=shard.layout)
    args = {"self": value, "size": rewriter.local(shape, shard)}
    rewriter.emit("aten.expand.default", args, rewriter.info[out], shard, name=out.name)


def repeat(rewriter: Rewriter) -> None:
    """repeat and tile: whole copies along dims that are not cut."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    counts = rewriter.argument("repeats" if rewriter.node.op.startswith("aten.repeat") else "dims")
    assert shard is not None
    behind = len(rewriter.shape(value)) - shard.dim
    if behind <= len(counts) and counts[-behind] != 1:
        rewriter.passed_on()
        return
    dim = len(rewriter.shape(rewriter.out())) - behind
    rewriter.keep(rewriter.node.args, Shard(dim=dim, layout=shard.layout))


def repeat_each(rewriter: Rewriter) -> None:
    """repeat_interleave: every element several times, one after the other."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    dim = rewriter.argument("dim")
    assert shard is not None
    if dim is None:
        rewriter.passed_on()
        return
    layout = shard.layout
    if normal_dim(dim, len(rewriter.shape(value))) == shard.dim:
        inner = times((layout.inner, rewriter.argument("repeats")))
        layout = Layout.of(layout.segments, layout.outer, inner, layout.origins)
    args = {key: item for key, item in rewriter.node.args.items() if key != "output_size"}
    rewriter.keep(args, Shard(dim=shard.dim, layout=layout))


# Permutations


def _permutation(order: Callable[[Rewriter, int], list[int]]) -> Rule:
    def rule(rewriter: Rewriter) -> None:
        value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
        assert shard is not None
        places = order(rewriter, len(rewriter.shape(value)))
        rewriter.keep(rewriter.node.args, Shard(dim=places.index(shard.dim), layout=shard.layout))

    return rule


def _swapped(first: str, second: str) -> Callable[[Rewriter, int], list[int]]:
    def order(rewriter: Rewriter, ndim: int) -> list[int]:
        places = list(range(ndim))
        one, other = (normal_dim(rewriter.argument(key), ndim) for key in (first, second))
        places[one], places[other] = places[other], places[one]
        return places

    return order


def _permuted(rewriter: Rewriter, ndim: int) -> list[int]:
    return [normal_dim(dim, ndim) for dim in rewriter.argument("dims")]


def _last_two(rewriter: Rewriter, ndim: int) -> list[int]:
    del rewriter
    return [*range(ndim - 2), ndim - 1, ndim - 2] if ndim > 1 else [0]


def _reversed(rewriter: Rewriter, ndim: int) -> list[int]:
    del rewriter
    return list(reversed(range(ndim)))


def _moved(rewriter: Rewriter, ndim: int) -> list[int]:
    source, target = rewriter.argument("source"), rewriter.argument("destination")
    sources = source if isinstance(source, tuple) else (source,)
    targets = target if isinstance(target, tuple) else (target,)
    placed = {normal_dim(to, ndim): normal_dim(at, ndim) for at, to in zip(sources, targets, strict=True)}
    rest = iter(dim for dim in range(ndim) if dim not in placed.values())
    return [placed[dim] if dim in placed else next(rest) for dim in range(ndim)]


# Slices


def _piecewise(rewriter: Rewriter, value: Name, shard: Shard, sizes: Sequence[int]) -> None:
    """Pieces of the cut dim, one after the other."""
    total = sliceable(shard.layout)
    if total is None or sum(sizes) != total or len(sizes) != len(rewriter.node.out):
        rewriter.passed_on()
        return
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    rewriter.plans.use_cuts(shard.layout, stops[:-1])
    layouts = [cropped(shard.layout, stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    args = {"self": value, "split_sizes": tuple(rewriter.held(layout) for layout in layouts), "dim": shard.dim}
    shards = [Shard(dim=shard.dim, layout=layout) for layout in layouts]
    rewriter.keep_each(args, shards, op="aten.split_with_sizes.default")


def _split(sizes_of: Callable[[Rewriter, int], list[int]]) -> Rule:
    def rule(rewriter: Rewriter) -> None:
        value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
        assert shard is not None
        if normal_dim(rewriter.argument("dim"), len(rewriter.shape(value))) != shard.dim:
            rewriter.keep(rewriter.node.args, shard)
            return
        extent = rewriter.shape(value)[shard.dim]
        if isinstance(extent, int):
            _piecewise(rewriter, value, shard, sizes_of(rewriter, extent))
        else:
            rewriter.passed_on()

    return rule


def _equal_parts(extent: int, size: int) -> list[int]:
    return [min(size, extent - at) for at in range(0, extent, size)]


def _sizes_of_split(rewriter: Rewriter, extent: int) -> list[int]:
    size = rewriter.argument("split_size")
    return _numbers(size) if isinstance(size, tuple) else _equal_parts(extent, size)


def _numbers(sizes: tuple[Loose, ...]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in sizes]


def _sizes_of_sections(rewriter: Rewriter, extent: int) -> list[int]:
    sections = rewriter.argument("sections")
    return [extent // sections + (index < extent % sections) for index in range(sections)]


def positions(rewriter: Rewriter) -> None:
    """select and unbind: of the cut dim only after the weights were asked to be cut otherwise."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    assert shard is not None
    dim = normal_dim(rewriter.argument("dim"), len(rewriter.shape(value)))
    if dim == shard.dim:
        total = sliceable(shard.layout)
        if total is not None:
            rewriter.plans.use_cuts(shard.layout, range(1, total))
        rewriter.passed_on()
        return
    rewriter.keep(rewriter.node.args, Shard(dim=shard.dim - (dim < shard.dim), layout=shard.layout))


def slice_of(rewriter: Rewriter) -> None:
    """slice and narrow."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    assert shard is not None
    if normal_dim(rewriter.argument("dim"), len(rewriter.shape(value))) != shard.dim:
        rewriter.keep(rewriter.node.args, shard)
        return
    bounds, total = _bounds(rewriter), sliceable(shard.layout)
    if bounds is None or total is None:
        rewriter.passed_on()
        return
    start, stop = bounds
    rewriter.plans.use_cuts(shard.layout, [start, stop])
    layout = cropped(shard.layout, start, stop)
    before = cropped(shard.layout, 0, start)
    args = {"self": value, "dim": shard.dim, "start": rewriter.held(before), "length": rewriter.held(layout)}
    rewriter.keep(args, Shard(dim=shard.dim, layout=layout), op="aten.narrow.default")


def _bounds(rewriter: Rewriter) -> tuple[int, int] | None:
    """(start, stop) of a slice with step 1 whose numbers are known."""
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    assert shard is not None
    extent, kept = rewriter.shape(value)[shard.dim], rewriter.shape(rewriter.out())[shard.dim]
    start = rewriter.argument("start")
    if rewriter.argument("step") not in (None, 1) or not isinstance(extent, int) or not isinstance(kept, int):
        return None
    if start is not None and not isinstance(start, int):
        return None
    first = 0 if start is None else min(normal_dim(start, extent), extent)
    return max(first, 0), max(first, 0) + kept


# Joins


def join(rewriter: Rewriter) -> None:
    """cat: along dims that are not cut, or of operands that are all cut along it."""
    names: tuple[Name, ...] = rewriter.argument("tensors")
    shards = [rewriter.shard(name) for name in names]
    ndim = len(rewriter.shape(rewriter.out()))
    dim = normal_dim(rewriter.argument("dim"), ndim)
    along = [shard.layout for shard in shards if shard is not None and shard.dim == dim and sliceable(shard.layout)]
    if len(along) == len(names):
        origins = {name: replace(origin, offset=None) for layout in along for name, origin in layout.origins.items()}
        segments = tuple(segment for layout in along for segment in layout.segments)
        rewriter.keep(rewriter.node.args, Shard(dim=dim, layout=Layout.of(segments, origins=origins)))
        return
    _alike(rewriter, names, next((shard for shard in shards if shard is not None and shard.dim != dim), None), 0, dim)


def stack(rewriter: Rewriter) -> None:
    names: tuple[Name, ...] = rewriter.argument("tensors")
    dim = normal_dim(rewriter.argument("dim"), len(rewriter.shape(rewriter.out())))
    shard = next((found for found in map(rewriter.shard, names) if found is not None), None)
    _alike(rewriter, names, shard, 1, dim)


def _alike(rewriter: Rewriter, names: Sequence[Name], shard: Shard | None, added: int, dim: int) -> None:
    if shard is None:
        rewriter.passed_on()
        return
    layout = following(rewriter, iter(names), shard.layout)
    aligned = tuple(rewriter.aligned(name, shard) for name in names)
    place = shard.dim + (1 if added and dim <= shard.dim else 0)
    rewriter.keep({**rewriter.node.args, "tensors": aligned}, Shard(dim=place, layout=layout))


# Along one dim


def _along(*keys: str) -> Rule:
    """Operations within some dims: cut values stay so along all others."""

    def rule(rewriter: Rewriter) -> None:
        value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
        ndim = len(rewriter.shape(value))
        found = [rewriter.argument(key) for key in keys]
        dims = [dim for item in found for dim in (item if isinstance(item, tuple) else (item,))]
        touched = {normal_dim(dim, ndim) for dim in dims if isinstance(dim, int)} if dims else set(range(ndim))
        if shard is None or shard.dim in touched:
            rewriter.passed_on()
        else:
            rewriter.keep(rewriter.node.args, shard)

    return rule


def _within_last_two(rewriter: Rewriter) -> None:
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    if shard is None or shard.dim >= len(rewriter.shape(value)) - 2:
        rewriter.passed_on()
    else:
        rewriter.keep(rewriter.node.args, shard)


def pad(rewriter: Rewriter) -> None:
    value, shard = rewriter.argument("self"), rewriter.shard(rewriter.argument("self"))
    assert shard is not None
    amounts = rewriter.argument("pad")
    touched = len(rewriter.shape(value)) - len(amounts) // 2
    if shard.dim >= touched and any(amount != 0 for amount in _pads(amounts, rewriter, value, shard)):
        rewriter.passed_on()
    else:
        rewriter.keep(rewriter.node.args, shard)


def _pads(amounts: tuple[Loose, ...], rewriter: Rewriter, value: Name, shard: Shard) -> tuple[Loose, ...]:
    behind = len(rewriter.shape(value)) - 1 - shard.dim
    return amounts[2 * behind : 2 * behind + 2]


def like_sizes(rewriter: Rewriter) -> None:
    """new_zeros and the like: of the tensor only the dtype counts."""
    rewriter.keep(rewriter.node.args, None)


def written(rewriter: Rewriter) -> None:
    """slice_scatter: a part of one dim replaced, where both are cut along another."""
    names = [rewriter.argument("self"), rewriter.argument("src")]
    shape = rewriter.shape(rewriter.out())
    shard = lead(rewriter, iter(names), shape)
    if shard is None or normal_dim(rewriter.argument("dim"), len(shape)) == shard.dim:
        rewriter.passed_on()
        return
    aligned = [rewriter.aligned(name, shard) for name in names]
    rewriter.keep({**rewriter.node.args, "self": aligned[0], "src": aligned[1]}, shard)


_VIEWS = (
    "aten.view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.atleast_1d.default",
    "aten.atleast_2d.default",
    "aten.ravel.default",
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_VIEWS, view),
    "aten.expand.default": expand,
    "aten.expand_as.default": expand,
    "aten.broadcast_to.default": expand,
    "aten.repeat.default": repeat,
    "aten.tile.default": repeat,
    "aten.repeat_interleave.self_int": repeat_each,
    "aten.transpose.int": _permutation(_swapped("dim0", "dim1")),
    "aten.swapdims.default": _permutation(_swapped("dim0", "dim1")),
    "aten.swapaxes.default": _permutation(_swapped("axis0", "axis1")),
    "aten.permute.default": _permutation(_permuted),
    "aten.t.default": _permutation(_last_two),
    "aten.mT.default": _permutation(_last_two),
    "aten.numpy_T.default": _permutation(_reversed),
    "aten.movedim.int": _permutation(_moved),
    "aten.movedim.intlist": _permutation(_moved),
    "aten.split.Tensor": _split(_sizes_of_split),
    "aten.split.sizes": _split(_sizes_of_split),
    "aten.split_with_sizes.default": _split(lambda rewriter, _: _numbers(rewriter.argument("split_sizes"))),
    "aten.chunk.default": _split(
        lambda rewriter, extent: _equal_parts(extent, -(-extent // rewriter.argument("chunks")))
    ),
    "aten.tensor_split.sections": _split(_sizes_of_sections),
    "aten.unbind.int": positions,
    "aten.select.int": positions,
    "aten.slice.Tensor": slice_of,
    "aten.narrow.default": slice_of,
    "aten.cat.default": join,
    "aten.concat.default": join,
    "aten.stack.default": stack,
    "aten.flip.default": _along("dims"),
    "aten.roll.default": _along("dims"),
    "aten.tril.default": _within_last_two,
    "aten.triu.default": _within_last_two,
    "aten.unfold.default": _along("dimension"),
    "aten.pad.default": pad,
    "aten.constant_pad_nd.default": pad,
    "aten.new_zeros.default": like_sizes,
    "aten.new_ones.default": like_sizes,
    "aten.new_full.default": like_sizes,
    "aten.slice_scatter.default": written,
}
"""Flattening roll (no dims) and the like touch every dim and get whole values."""
