"""A program compiled to steps over slots: what a step calls, which slots it reads, writes and frees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from distensor.core.compute import Recompute
from distensor.program.axes import Groups
from distensor.program.calls import Call
from distensor.program.collectives import COLLECTIVES
from distensor.program.deferral import Deferral
from distensor.program.draws import Draws
from distensor.program.ops import RANDOM
from distensor.program.products import putting_off
from distensor.program.recomputation import Segment, segments
from distensor.program.signatures import SIGNATURES
from distensor.program.values import Node, ProgramData, Ref, WeightRef

Gather: TypeAlias = "Callable[[list[Any]], tuple[Any, ...]] | None"
"""Reads several slots at once; None when there is one argument (`single`)."""
Step: TypeAlias = "tuple[Callable[..., Any], Gather, int, int, tuple[int, ...]]"
ConstantStep: TypeAlias = "tuple[Callable[..., Any], Gather, int, int]"


@dataclass(kw_only=True, slots=True)
class Tape:
    """Steps in order. `constant` steps depend on sizes and buffers alone and run once per size of the batch."""

    slots: int = 0
    weights: list[tuple[str, int]] = field(default_factory=list)
    literals: list[tuple[int, Any]] = field(default_factory=list)
    inputs: list[tuple[int, str]] = field(default_factory=list)
    results: list[tuple[str, int]] = field(default_factory=list)
    constant: list[ConstantStep] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()
    """All steps, in parts that are kept or recomputed."""


def record(
    program: ProgramData,
    draws: Draws,
    device: torch.device,
    groups: Groups,
    deferral: Deferral | None = None,
    recompute: Recompute = Recompute.NONE,
) -> Tape:
    """The tape of a checked program; with `deferral`, products that can put off their weights' gradients."""
    return _Recorder(program, draws, device, groups, deferral).record(recompute)


class _Recorder:
    def __init__(
        self, program: ProgramData, draws: Draws, device: torch.device, groups: Groups, deferral: Deferral | None
    ) -> None:
        self._program = program
        self._deferral = deferral
        self._products = putting_off(program) if deferral is not None else {}
        self._draws = draws
        self._device = device
        self._groups = groups
        self._tape = Tape()
        self._values: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._constants: set[int] = set()
        self._pending: list[tuple[Callable[..., Any], list[int], int, Node]] = []

    def record(self, recompute: Recompute) -> Tape:
        for weight in (*self._program.parameters, *self._program.buffers):
            self._weights[weight.name] = self._slot()
        self._constants.update(self._weights[buffer.name] for buffer in self._program.buffers)
        for spec in self._program.inputs:
            self._values[spec.name] = self._slot()
        for index, node in enumerate(self._program.nodes):
            self._record_node(node, self._products.get(index))
        self._finish()
        modules = [node.module for _, _, _, node in self._pending]
        reads, writes = [sources for _, sources, _, _ in self._pending], [out for _, _, out, _ in self._pending]
        held = self._constants | set(self._weights.values())
        self._tape.segments = segments(modules, reads, writes, held, recompute)
        return self._tape

    def _slot(self) -> int:
        self._tape.slots += 1
        return self._tape.slots - 1

    def _record_node(self, node: Node, group: int | None) -> None:
        call = Call(node, self._draws, self._device, self._groups)
        if group is not None and self._deferral is not None:
            call.function = self._deferral.wrap(node.op, group, call.function)
        sources = [self._source(value) for value in call.arguments]
        constant = _is_fixed(node) and all(slot in self._constants for slot in sources)
        out = self._slot()
        self._step(call.function, sources, out, node, constant)
        if len(node.out) == 1 and not _is_many(node):
            self._values[str(node.out[0])] = out
            return
        for index, name in enumerate(node.out):
            if name is not None:
                self._values[name] = self._slot()
                self._step(operator.itemgetter(index), [out], self._values[name], node, constant)

    def _source(self, value: Any) -> int:
        if isinstance(value, Ref):
            return self._values[value.name]
        if isinstance(value, WeightRef):
            return self._weights[value.name]
        slot = self._slot()
        self._tape.literals.append((slot, value))
        self._constants.add(slot)
        return slot

    def _step(self, function: Callable[..., Any], sources: list[int], out: int, node: Node, constant: bool) -> None:
        if constant:
            gather, single = _gather(sources)
            self._tape.constant.append((function, gather, single, out))
            self._constants.add(out)
        else:
            self._pending.append((function, sources, out, node))

    def _finish(self) -> None:
        tape = self._tape
        tape.weights = list(self._weights.items())
        tape.inputs = [(self._values[spec.name], spec.name) for spec in self._program.inputs]
        tape.results = [(name, self._values[name]) for name in self._program.results]
        frees = list(self._frees())
        for (function, sources, out, node), free in zip(self._pending, frees, strict=True):
            tape.steps.append((function, *_gather(sources), out, free))
            tape.places.append(f"{node.op} in {node.module or 'the root module'}")

    def _frees(self) -> Iterator[tuple[int, ...]]:
        """For each step the slots that no later step reads: results are kept, weights and constants too."""
        kept = {slot for _, slot in self._tape.results} | self._constants | set(self._weights.values())
        last: dict[int, int] = {}
        for position, (_, sources, out, _) in enumerate(self._pending):
            for slot in (*sources, out):
                last[slot] = position
        dying: dict[int, list[int]] = {}
        for slot, position in last.items():
            if slot not in kept:
                dying.setdefault(position, []).append(slot)
        return (tuple(dying.get(position, ())) for position in range(len(self._pending)))


def _gather(sources: list[int]) -> tuple[Gather, int]:
    if len(sources) == 1:
        return None, sources[0]
    if not sources:
        return _nothing, -1
    return operator.itemgetter(*sources), -1


def _nothing(environment: list[Any]) -> tuple[Any, ...]:
    del environment
    return ()


def _is_fixed(node: Node) -> bool:
    """Whether the same arguments give the same result without talking to anybody; a split only picks its part."""
    return node.op not in RANDOM and (node.op not in COLLECTIVES or node.op == "dist.split.default")


def _is_many(node: Node) -> bool:
    """Whether torch returns a list although one name is given."""
    return SIGNATURES[node.op].results is None
