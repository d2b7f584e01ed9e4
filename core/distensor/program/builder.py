"""The graph under construction: nodes in single assignment, values with dtype, shape and 'needs a gradient'.

Writes in place are turned into new values here: a place is what a variable of the captured graph refers to,
and views keep a link to what they view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from distensor.core.errors import CaptureError
from distensor.program.expressions import Extent
from distensor.program.values import Argument, DType, Node, Ref, WeightRef, WeightSpec

Name: TypeAlias = "Ref | WeightRef"


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """What is known of a value."""

    dtype: DType
    shape: tuple[Extent, ...]
    requires_grad: bool


@dataclass(slots=True)
class View:
    """How a place was made from its parent, and how a write goes back."""

    parent: Place
    op: str
    args: Mapping[str, Argument]


@dataclass(slots=True)
class Place:
    """A variable. Its current value is `name`; a view is stale when its root was written since."""

    name: Name
    view: View | None = None
    version: int = 0
    is_weight: bool = False
    """A parameter or buffer of the module, which no forward pass may write."""

    @property
    def root(self) -> Place:
        return self if self.view is None else self.view.parent.root


@dataclass(slots=True)
class GraphBuilder:
    """Collects nodes. `module` is the FQN that new nodes belong to."""

    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Info] = field(default_factory=dict)
    weights: dict[str, Info] = field(default_factory=dict)
    module: str = ""
    sites: int = 0
    _taken: set[str] = field(default_factory=set)

    def info(self, name: Name) -> Info:
        return self.values[name.name] if isinstance(name, Ref) else self.weights[name.name]

    def add_weight(self, spec: WeightSpec) -> WeightRef:
        self.weights[spec.name] = Info(dtype=spec.dtype, shape=spec.shape, requires_grad=spec.requires_grad)
        return WeightRef(spec.name)

    def fresh(self, hint: str) -> str:
        """A value name that starts with %, so that it is no name of the batch."""
        name, count = f"%{hint}", 1
        while name in self._taken:
            name, count = f"%{hint}.{count}", count + 1
        self._taken.add(name)
        return name

    def emit(
        self, op: str, args: Mapping[str, Argument], infos: Sequence[Info], hint: str, *, random: bool = False
    ) -> list[Ref]:
        """A new node; one result for each info."""
        names = [self.fresh(hint) for _ in infos]
        site = None
        if random:
            site, self.sites = self.sites, self.sites + 1
        self.nodes.append(Node(op=op, args=dict(args), out=tuple(names), module=self.module, site=site))
        for name, info in zip(names, infos, strict=True):
            self.values[name] = info
        return [Ref(name) for name in names]

    def emit_one(self, op: str, args: Mapping[str, Argument], info: Info, hint: str) -> Ref:
        return self.emit(op, args, [info], hint)[0]

    def read(self, place: Place) -> Name:
        """The current value of a place; a stale view is made anew."""
        view = place.view
        if view is None or place.version == place.root.version:
            return place.name
        parent = self.read(view.parent)
        hint = place.name.name.lstrip("%")
        place.name = self.emit_one(view.op, {"self": parent, **view.args}, self.info(place.name), hint)
        place.version = place.root.version
        return place.name

    def write(self, place: Place, name: Name) -> None:
        """`place` now holds `name`; so do all that it views and all that view it."""
        root = place.root
        if root.is_weight:
            raise CaptureError(f"{_where(self.module)} writes into {root.name.name!r} during forward; {_WRITE_ADVICE}")
        place.name = name
        chain = [place]
        while place.view is not None:
            parent = place.view.parent
            parent.name = self._write_back(place.view, self.read(parent), place.name)
            chain.append(parent)
            place = parent
        root.version += 1
        for written in chain:
            written.version = root.version

    def _write_back(self, view: View, old: Name, new: Name) -> Ref:
        info = self.info(old)
        info = Info(
            dtype=info.dtype, shape=info.shape, requires_grad=info.requires_grad or self.info(new).requires_grad
        )
        if view.op in _SCATTERS:
            return self.emit_one(_SCATTERS[view.op], {"self": old, "src": new, **view.args}, info, "write")
        if view.op in _RESHAPES:
            return self.emit_one("aten.reshape.default", {"self": new, "shape": info.shape}, info, "write")
        if view.op == "aten.transpose.int":
            return self.emit_one(view.op, {"self": new, **view.args}, info, "write")
        raise CaptureError(
            f"{_where(self.module)} writes in place into a view made by {view.op}; write x = f(x) instead"
        )


_SCATTERS = {
    "aten.slice.Tensor": "aten.slice_scatter.default",
    "aten.select.int": "aten.select_scatter.default",
}
_RESHAPES = frozenset(
    {
        "aten.view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.default",
        "aten.unflatten.int",
    }
)
VIEWS = frozenset(
    {
        *_SCATTERS,
        *_RESHAPES,
        "aten.transpose.int",
        "aten.permute.default",
        "aten.t.default",
        "aten.mT.default",
        "aten.expand.default",
        "aten.narrow.default",
        "aten.diagonal.default",
        "aten.unfold.default",
        "aten.movedim.int",
    }
)
"""Single results that share memory with `self`."""

_WRITE_ADVICE = (
    "a stage keeps its buffers as they are: use a layer without running statistics (LayerNorm, GroupNorm), "
    "or freeze this one with .eval()"
)


def _where(module: str) -> str:
    return f"module {module!r}" if module else "the root module"
