"""Which stage each node belongs to, and which values are copied into every stage that uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from distensor.core.errors import StageMappingError
from distensor.program.capturing import Captured
from distensor.program.ops import RANDOM
from distensor.program.values import Node, Ref, WeightRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`stage_of[i]` is the stage of node i, or None for glue: constant, without gradient, copied where it is used."""

    stages: int
    stage_of: tuple[int | None, ...]
    homes: Mapping[str, int]
    """Canonical parameter name -> the first stage that its names are mapped to."""


def place(captured: Captured, mapping: Mapping[str, int]) -> Placement:
    """Assign every node. `mapping` maps parameter or module FQNs to stages; an empty one means one stage.

    Raises:
        StageMappingError: a parameter without a stage, stages that are not 0, 1, 2 ..., or used out of order.
    """
    homes = _StageLookup(captured.aliases, mapping)
    return _Placer(captured, homes).run()


class _StageLookup:
    """FQN -> stage, for parameters and for modules whose parameters all live in one stage."""

    def __init__(self, aliases: Mapping[str, str], mapping: Mapping[str, int]) -> None:
        self._mapping = mapping
        self.stages = max(mapping.values(), default=0) + 1
        self.by_name: dict[str, int] = {}
        self.homes: dict[str, set[int]] = {}
        for name, canonical in aliases.items():
            stage = self._stage_of_name(name)
            if stage is not None:
                self.by_name[name] = stage
                self.homes.setdefault(canonical, set()).add(stage)
        missing = sorted(set(aliases.values()) - self.homes.keys())
        if missing:
            raise StageMappingError(f"no stage for {_some(missing)}: every parameter belongs to exactly one stage")
        self._check_stages()
        self._modules = _module_stages(self.by_name)
        self._modules.update({name: {stage} for name, stage in mapping.items()})

    def _stage_of_name(self, name: str) -> int | None:
        if not self._mapping:
            return 0
        return next((self._mapping[path] for path in (name, *parents(name)) if path in self._mapping), None)

    def _check_stages(self) -> None:
        empty = sorted(set(range(self.stages)) - set(self.by_name.values()) - set(self._mapping.values()))
        if empty or any(stage < 0 for stage in self._mapping.values()):
            raise StageMappingError(f"stages {empty} hold nothing; stages are numbered 0 to {self.stages - 1}")

    def of_module(self, module: str) -> int | None:
        """The stage of the innermost enclosing module that has parameters, if they share one."""
        for path in (module, *parents(module)):
            stages = self._modules.get(path)
            if stages:
                return next(iter(stages)) if len(stages) == 1 else None
        return None


def _module_stages(by_name: Mapping[str, int]) -> dict[str, set[int]]:
    stages: dict[str, set[int]] = {}
    for name, stage in by_name.items():
        for path in parents(name):
            stages.setdefault(path, set()).add(stage)
    return stages


def parents(name: str) -> Iterator[str]:
    """a.b.c -> a.b, a."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


@dataclass(slots=True)
class _Placer:
    captured: Captured
    lookup: _StageLookup
    _stage: dict[str, int] = field(default_factory=dict)
    _glue: set[str] = field(default_factory=set)
    _casts: dict[str, str] = field(default_factory=dict)
    """Casts of parameters: value -> parameter. Copied where they are used: no cast weight crosses a border."""

    def run(self) -> Placement:
        self._glue.update(spec.name for spec in self.captured.inputs)
        found = tuple(self._place(node) for node in self.captured.nodes)
        first = {name: min(stages) for name, stages in self.lookup.homes.items()}
        return Placement(stages=self.lookup.stages, stage_of=found, homes=first)

    def _place(self, node: Node) -> int | None:
        names = [name for name in node.out if name is not None]
        source = node.args.get("self")
        if node.op == "aten.to.dtype" and isinstance(source, WeightRef) and source.name in self.captured.parameters:
            self._casts.update(dict.fromkeys(names, source.name))
            return None
        if self._is_glue(node):
            self._glue.update(names)
            return None
        stage = self._stage_of(node)
        self._stage.update(dict.fromkeys(names, stage))
        return stage

    def _is_glue(self, node: Node) -> bool:
        if node.site is not None or (node.op in RANDOM and node.op != "aten.scaled_dot_product_attention.default"):
            return False
        return all(
            reference.name in (self._glue if isinstance(reference, Ref) else self.captured.buffers)
            for reference in node.references()
        )

    def _stage_of(self, node: Node) -> int:
        references = list(node.references())
        arrived = max((self._stage.get(item.name, 0) for item in references if isinstance(item, Ref)), default=0)
        named = [item.name if isinstance(item, WeightRef) else self._casts.get(item.name, "") for item in references]
        weights = [name for name in named if name in self.lookup.homes]
        declared = self.lookup.of_module(node.module)
        if declared is None:
            homes = [stage for name in weights for stage in self.lookup.homes[name] if stage >= arrived]
            return min(homes, default=arrived)
        if declared < arrived and weights:
            raise StageMappingError(
                f"module {node.module!r} is in stage {declared} but uses what stage {arrived} computes "
                f"({node.op} with {_some(weights)}): stages must follow the order of the forward pass"
            )
        return max(declared, arrived)
