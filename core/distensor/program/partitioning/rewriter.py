"""The graph under rewriting for the ranks of one axis: what is cut where, and the nodes that change that.

All ranks get the same nodes in the same order; only numbers differ (`PerRank`), so collectives always meet.

Convention: a value is the same on all ranks or cut along one dim; sums are completed at once. The gradient of a value
that is the same everywhere is the full gradient on each rank, that of a cut value its slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from distensor.core.parallel import Axis
from distensor.program.builder import Info, Name
from distensor.program.capturing import Captured
from distensor.program.expressions import Extent
from distensor.program.ops import RANDOM
from distensor.program.partitioning.layout import Layout, Shard
from distensor.program.partitioning.plans import Plans
from distensor.program.signatures import SIGNATURES
from distensor.program.values import Argument, Node, Ref, WeightRef

TENSOR_AXIS = Axis.TP.value


@dataclass(frozen=True, slots=True)
class PerRank:
    """An argument that differs between the ranks."""

    values: tuple[Argument, ...]


Loose: TypeAlias = Any
"""An argument, perhaps with PerRank inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A node with arguments for all ranks."""

    op: str
    args: Mapping[str, Loose]
    out: tuple[str | None, ...]
    module: str
    sites: tuple[int | None, ...]

    def node(self, rank: int) -> Node:
        args = {name: resolved(value, rank) for name, value in self.args.items()}
        return Node(op=self.op, args=args, out=self.out, module=self.module, site=self.sites[rank])


def resolved(value: Loose, rank: int) -> Argument:
    if isinstance(value, PerRank):
        return value.values[rank]
    if isinstance(value, tuple):
        return tuple(resolved(item, rank) for item in value)
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """A cut value that had to be made whole, because its operation has no rule for cut values."""

    op: str
    module: str
    weights: tuple[str, ...]


class Rewriter:
    """Reads the nodes of `captured` through rules and writes drafts."""

    def __init__(self, captured: Captured, plans: Plans) -> None:
        self.captured = captured
        self.size = plans.ranks
        self.plans = plans
        self.drafts: list[Draft] = []
        self.gathers: list[Gathered] = []
        self.info: dict[Name, Info] = {Ref(name): info for name, info in captured.values.items()}
        for spec in (*captured.parameters.values(), *captured.buffers.values()):
            self.info[WeightRef(spec.name)] = Info(
                dtype=spec.dtype, shape=tuple(spec.shape), requires_grad=spec.requires_grad
            )
        self.shards: dict[Name, Shard] = {
            WeightRef(name): Shard(dim=plan.dim, layout=plan.start()) for name, plan in plans.of.items()
        }
        self._casts = {
            Ref(str(node.out[0])): node.args["self"] for node in captured.nodes if node.op == "aten.to.dtype"
        }
        self._made: dict[tuple[Any, ...], Ref] = {}
        self._taken = set(captured.values)
        self._counts: Counter[str] = Counter()
        self._sites = 1 + max((node.site for node in captured.nodes if node.site is not None), default=-1)
        self.node: Node = captured.nodes[0]

    # What is known of values

    def shard(self, name: Loose) -> Shard | None:
        """How a value is cut; None for one that is the same on all ranks, and for what is no value."""
        return self.shards.get(name) if isinstance(name, (Ref, WeightRef)) else None

    def shape(self, name: Name) -> tuple[Extent, ...]:
        """The full shape."""
        return self.info[name].shape

    def local(self, shape: Sequence[Extent], shard: Shard | None) -> tuple[Loose, ...]:
        """A full shape as each rank sees it."""
        if shard is None:
            return tuple(shape)
        return (*shape[: shard.dim], self.held(shard.layout), *shape[shard.dim + 1 :])

    def held(self, layout: Layout) -> Loose:
        return self.each(layout.held(rank) for rank in range(self.size))

    @staticmethod
    def each(values: Iterable[Argument]) -> Loose:
        """One argument per rank; plain where they agree."""
        found = tuple(values)
        return found[0] if all(value == found[0] for value in found) else PerRank(found)

    def argument(self, name: str) -> Loose:
        """An argument of the node at hand, or its default."""
        if name in self.node.args:
            return self.node.args[name]
        parameter = SIGNATURES[self.node.op].parameter(name)
        return None if parameter is None else parameter.default

    def out(self, index: int = 0) -> Ref:
        """A result of the node at hand."""
        name = self.node.out[index]
        return Ref(name if name is not None else "")

    # Writing nodes

    def fresh(self, hint: str) -> str:
        base = hint if hint.startswith("%") else f"%{hint}"
        name = base
        while name in self._taken:
            self._counts[base] += 1
            name = f"{base}.{TENSOR_AXIS}{self._counts[base]}"
        self._taken.add(name)
        return name

    def emit(
        self, op: str, args: Mapping[str, Loose], info: Info, shard: Shard | None = None, *, name: str | None = None
    ) -> Ref:
        """A node of one result; `info` has the full shape. With `name`, it is that value of the captured graph."""
        made = Ref(name if name is not None else self.fresh(self.node.out[0] or "value"))
        self._draft(op, args, (made.name,), None, spread=False)
        self._bind(made, info, shard)
        return made

    def keep(self, args: Mapping[str, Loose], shard: Shard | None, *, op: str | None = None) -> None:
        """The node at hand with other arguments; all its results are cut alike."""
        self.keep_each(args, [shard] * len(self.node.out), op=op)

    def keep_each(self, args: Mapping[str, Loose], shards: Sequence[Shard | None], *, op: str | None = None) -> None:
        """The node at hand with other arguments and results that are cut like `shards`."""
        spread = any(shard is not None for shard in shards)
        self._draft(op or self.node.op, args, self.node.out, self.node.site, spread=spread)
        for name, shard in zip(self.node.out, shards, strict=True):
            if name is not None:
                self._bind(Ref(name), self.info[Ref(name)], shard)

    def _draft(
        self, op: str, args: Mapping[str, Loose], out: tuple[str | None, ...], site: int | None, *, spread: bool
    ) -> None:
        sites: tuple[int | None, ...] = (site,) * self.size
        if spread and site is not None and op in RANDOM:
            # Cut values draw from a stream of their own on each rank, all others from the common one.
            sites = tuple(site + self._sites * (1 + rank) for rank in range(self.size))
        self.drafts.append(Draft(op=op, args=dict(args), out=out, module=self.node.module, sites=sites))

    def _bind(self, name: Ref, info: Info, shard: Shard | None) -> None:
        self.info[name] = info
        if shard is not None:
            self.shards[name] = shard

    # Changing how values are cut

    def _collective(self, kind: str, value: Name, args: Mapping[str, Loose], info: Info, shard: Shard | None) -> Ref:
        return self.emit(f"dist.{kind}.default", {"self": value, **args, "axis": TENSOR_AXIS}, info, shard)

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Ref]) -> Ref:
        """Made once for all that use a value; a weight's in every module, which may be another stage."""
        if isinstance(key[1], WeightRef):
            key = (*key, self.node.module)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def entered(self, value: Name) -> Name:
        """A whole value on its way into compute that differs between the ranks."""
        info = self.info[value]
        if not info.requires_grad:
            return value
        return self._cached(("enter", value), lambda: self._enter(value, info))

    def _enter(self, value: Name, info: Info) -> Ref:
        """The source of a cast goes in rather than each cast of it: one sum of gradients instead of several."""
        source = self._casts.get(value) if isinstance(value, Ref) else None
        if isinstance(source, Ref) and self.shard(source) is None and self.info[source].requires_grad:
            return self.emit("aten.to.dtype", {"self": self.entered(source), "dtype": info.dtype.value}, info)
        return self._collective("enter", value, {}, info, None)

    def whole(self, value: Name, *, planned: bool = False) -> Name:
        """The full value on every rank. `planned`: the rule wants it so, it is no way out."""
        shard = self.shards.get(value)
        if shard is None:
            return value
        if not planned:
            self.plans.note_detour(shard.layout)
            weights = tuple(sorted(shard.layout.origins))
            self.gathers.append(Gathered(op=self.node.op, module=self.node.module, weights=weights))
        args = {"dim": shard.dim, **_pieces(shard.layout)}
        return self._cached(("gather", value), lambda: self._collective("gather", value, args, self.info[value], None))

    def outside(self, value: Name) -> Name:
        """Made whole if it is cut, on its way into compute that differs between the ranks."""
        return self.entered(self.whole(value))

    def split(self, value: Name, shard: Shard) -> Name:
        """A whole value becomes cut."""
        args = {"dim": shard.dim, **_pieces(shard.layout)}
        key = ("split", value, shard.dim, shard.layout)
        return self._cached(key, lambda: self._collective("split", value, args, self.info[value], shard))

    def aligned(self, value: Name, shard: Shard) -> Name:
        """The value cut like `shard`."""
        found = self.shards.get(value)
        if found is not None and found.dim == shard.dim:
            if found.layout == shard.layout:
                return value
            self.plans.agree(found.layout, shard.layout)
        return self.split(self.whole(value), shard)

    def reduced(self, value: Name, *, name: str | None = None) -> Ref:
        """Partial sums become their sum on every rank."""
        args = {"self": value, "axis": TENSOR_AXIS}
        return self.emit("dist.reduce.default", args, self.info[value], name=name)

    def largest(self, value: Name) -> Ref:
        """The largest over the ranks, without a gradient."""
        info = replace(self.info[value], requires_grad=False)
        return self.emit("dist.maximum.default", {"self": value, "axis": TENSOR_AXIS}, info)

    # Small steps that rules share

    def reshaped(self, value: Name, name: str, shard: Shard | None) -> Ref:
        """`value` in the shape of the captured value `name`."""
        info = self.info[Ref(name)]
        args = {"self": value, "shape": self.local(info.shape, shard)}
        return self.emit("aten.reshape.default", args, info, shard, name=name)

    def one(self, op: str, args: Mapping[str, Loose], like: Name, shard: Shard | None = None) -> Ref:
        """A helper node whose result looks like `like`."""
        return self.emit(op, args, self.info[like], shard)

    def passed_on(self) -> None:
        """The node at hand as it is, on values that are made whole."""
        self.keep({name: self._whole_argument(value) for name, value in self.node.args.items()}, None)

    def _whole_argument(self, value: Loose) -> Loose:
        if isinstance(value, (Ref, WeightRef)):
            return self.whole(value)
        if isinstance(value, tuple):
            return tuple(self._whole_argument(item) for item in value)
        return value

    def is_cut(self) -> bool:
        """Whether any tensor of the node at hand is cut."""
        return any(self.shards.get(name) is not None for name in self.node.references())


def _pieces(layout: Layout) -> dict[str, Loose]:
    args: dict[str, Loose] = {
        "lengths": tuple(length for length, _ in layout.segments),
        "owners": tuple(owner for _, owner in layout.segments),
    }
    if layout.outer != 1:
        args["outer"] = layout.outer
    if layout.inner != 1:
        args["inner"] = layout.inner
    return args


def local_info(info: Info, shard: Shard | None, rank: int) -> Info:
    """What a rank holds of a value."""
    if shard is None:
        return info
    held = shard.layout.held(rank)
    return replace(info, shape=(*info.shape[: shard.dim], held, *info.shape[shard.dim + 1 :]))


def normal_dim(dim: int, ndim: int) -> int:
    """A tensor dim counted from the first."""
    return dim + ndim if dim < 0 else dim
