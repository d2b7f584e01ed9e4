"""The graph of one rank under construction: what each value is on this rank, and how it is brought into another form.

Three forms. A `Split` value holds the rank's chunks of the sequence. A value that is the same everywhere is WHOLE or
PARTIAL by its gradient; parameters are PARTIAL, for the gradient reducer sums over this axis too, and so is everything
computed from them alone. Values that need no gradient fit both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from distensor.core.parallel import Axis
from distensor.program.builder import Info
from distensor.program.capturing import Captured
from distensor.program.context.extents import Probes, minus
from distensor.program.context.layout import Layout, Same, Split, State
from distensor.program.expressions import Extent
from distensor.program.ops import RANDOM
from distensor.program.values import Argument, DType, Node, Ref, WeightRef

Name: TypeAlias = "Ref | WeightRef"
AXIS: Mapping[str, Argument] = {"axis": Axis.CP.value}


@dataclass(slots=True)
class Rewriter:
    """Collects the nodes of one rank. `captured` is the graph of all ranks together; `method` moves keys and values."""

    captured: Captured
    rank: int
    layout: Layout
    method: str
    probes: Probes
    remade: Callable[[Rewriter, Ref, Split], Ref | None]
    """Makes the part of a value without gradient anew (glue.py)."""
    makers: dict[str, Node] = field(default_factory=dict)
    """The original nodes by the values that they make."""
    nodes: list[Node] = field(default_factory=list)
    full: dict[str, Info] = field(default_factory=dict)
    """Every value as it is without the axis ..."""
    values: dict[str, Info] = field(default_factory=dict)
    """... and on this rank."""
    states: dict[str, State] = field(default_factory=dict)
    gathers: list[tuple[str, str]] = field(default_factory=list)
    """(operation, module) where a sequence had to be made whole."""
    module: str = ""
    _made: dict[object, Ref] = field(default_factory=dict)
    _count: int = 0

    @property
    def ranks(self) -> int:
        return len(set(self.layout.owners))

    def info(self, name: Name) -> Info:
        """The value as it is without the axis."""
        if isinstance(name, Ref):
            return self.full[name.name]
        spec = self.captured.parameters.get(name.name) or self.captured.buffers[name.name]
        return Info(dtype=spec.dtype, shape=spec.shape, requires_grad=spec.requires_grad)

    def shape(self, value: Argument) -> tuple[Extent, ...]:
        """The full shape; a number has none."""
        return self.info(value).shape if isinstance(value, (Ref, WeightRef)) else ()

    def state(self, name: Name) -> State:
        if isinstance(name, WeightRef):
            return Same.PARTIAL if name.name in self.captured.parameters else Same.WHOLE
        return self.states[name.name]

    def split_of(self, value: Argument) -> Split | None:
        found = self.state(value) if isinstance(value, (Ref, WeightRef)) else None
        return found if isinstance(found, Split) else None

    def same_split(self, split: Split, other: Split) -> bool:
        """Whether both cut their dims in the same way, wherever the dims are."""
        pairs = ((split.outer, other.outer), (split.inner, other.inner))
        return same_layout(self.probes, split.layout, other.layout) and all(self.probes.same(*pair) for pair in pairs)

    def local_shape(self, shape: Sequence[Extent], state: State) -> tuple[Extent, ...]:
        if not isinstance(state, Split):
            return tuple(shape)
        return (*shape[: state.dim], state.local(self.rank), *shape[state.dim + 1 :])

    # nodes

    def add(self, node: Node, args: Mapping[str, Argument], states: Sequence[State], op: str | None = None) -> None:
        """The node with other arguments; its results keep their names."""
        op = op or node.op
        site = node.site if op in RANDOM else None
        made = Node(op=op, args=dict(args), out=node.out, module=node.module, site=site)
        self.nodes.append(made)
        for name, state in zip(node.out, states, strict=True):
            if name is not None:
                self.know(name, self.captured.values[name], state)
                self.makers[name] = node

    def know(self, name: str, info: Info, state: State) -> None:
        self.full[name] = info
        shape = self.local_shape(info.shape, state)
        self.values[name] = Info(dtype=info.dtype, shape=shape, requires_grad=info.requires_grad)
        self.states[name] = state

    def emit(self, op: str, args: Mapping[str, Argument], full: Info, state: State, *, site: int | None = None) -> Ref:
        """A node of our own; `full` is its result as it is without the axis."""
        self._count += 1
        name = f"%cp.{self._count}"
        self.nodes.append(Node(op=op, args=dict(args), out=(name,), module=self.module, site=site))
        self.know(name, full, state)
        return Ref(name)

    def rename(self, node: Node, made: Ref) -> None:
        """What was emitted last is the result of `node`."""
        last, name = self.nodes.pop(), node.out[0]
        assert last.out == (made.name,)
        assert name is not None
        self.nodes.append(replace(last, out=node.out))
        self.know(name, self.captured.values[name], self.states[made.name])

    def _scope(self, name: Name) -> str:
        """Where a conversion is made once: stages may end between modules, and only what has no gradient (masks,
        positions) is copied into all that need it.
        """
        return self.module if isinstance(name, WeightRef) or self.info(name).requires_grad else ""

    def _once_made(self, what: str, name: Name, op: str, args: Mapping[str, Argument], state: State, full: Info) -> Ref:
        key = (what, name, state, self._scope(name))
        if key not in self._made:
            self._made[key] = self.emit(op, {"self": name, **args, **AXIS}, full, state)
        return self._made[key]

    # forms

    def whole(self, name: Name) -> Name:
        """For compute that all ranks do alike."""
        state, info = self.state(name), self.info(name)
        if isinstance(state, Split):
            return self._once_made("gather", name, "dist.gather.default", segments(state), Same.WHOLE, info)
        if state is Same.WHOLE or not info.requires_grad:
            return name
        return self._once_made("once", name, "dist.once.default", {}, Same.WHOLE, info)

    def partial(self, name: Name) -> Name:
        """For compute that differs between ranks, where each needs all of it."""
        state, info = self.state(name), self.info(name)
        if isinstance(state, Split):
            return self._once_made("collect", name, "dist.collect.default", segments(state), Same.PARTIAL, info)
        if state is Same.PARTIAL or not info.requires_grad:
            return name
        return self._once_made("enter", name, "dist.enter.default", {}, Same.PARTIAL, info)

    def cut(self, name: Name, split: Split) -> Name:
        """The rank's chunks of it."""
        state, info = self.state(name), self.info(name)
        if isinstance(state, Split):
            if state.dim == split.dim and self.same_split(state, split):
                return name
            return self.cut(self.whole(name), split)
        if state is Same.PARTIAL and info.requires_grad:
            return self._sliced(name, split)
        found = self._remade(name, split) if isinstance(name, Ref) and not info.requires_grad else None
        if found is not None:
            return found
        return self._once_made("split", name, "dist.split.default", segments(split), split, info)

    def _remade(self, name: Ref, split: Split) -> Ref | None:
        key = ("remade", name, split, "")
        if key not in self._made:
            found = self.remade(self, name, split)
            if found is None:
                return None
            self._made[key] = found
        return self._made[key]

    def _sliced(self, name: Name, split: Split) -> Name:
        """The rank's chunks by plain slices: the gradients are parts of the sum already, and nothing is exchanged."""
        info = self.info(name)
        if not split.is_plain:
            return self.cut(self.whole(name), split)
        parts = []
        for index, owner in enumerate(split.layout.owners):
            if owner == self.rank:
                start, stop = split.layout.cuts[index], split.layout.cuts[index + 1]
                args: Mapping[str, Argument] = {"self": name, "dim": split.dim, "start": start, "end": stop}
                shape = (*info.shape[: split.dim], minus(stop, start), *info.shape[split.dim + 1 :])
                part = Info(dtype=info.dtype, shape=shape, requires_grad=True)
                parts.append(self.emit("aten.slice.Tensor", args, part, Same.PARTIAL))
        return self.emit("aten.cat.default", {"tensors": tuple(parts), "dim": split.dim}, info, split)

    def reduced(self, op: str, args: Mapping[str, Argument], node: Node) -> Ref:
        """A node whose results on the ranks are parts of a sum, and their sum."""
        name = node.out[0]
        assert name is not None
        info = self.captured.values[name]
        part = self.emit(op, args, info, Same.PARTIAL)
        return self.emit("dist.reduce.default", {"self": part, **AXIS}, info, Same.WHOLE)


def same_layout(probes: Probes, layout: Layout, other: Layout) -> bool:
    return layout.owners == other.owners and all(map(probes.same, layout.cuts, other.cuts))


def segments(split: Split) -> Mapping[str, Argument]:
    """How a collective is told where the chunks are."""
    return {
        "dim": split.dim,
        "lengths": split.layout.lengths,
        "owners": split.layout.owners,
        "outer": split.outer,
        "inner": split.inner,
    }


def real(info: Info, shape: Sequence[Extent], dtype: DType | None = None) -> Info:
    """The same kind of value in another shape."""
    return Info(dtype=dtype or info.dtype, shape=tuple(shape), requires_grad=info.requires_grad)
