"""A captured module cut into stage programs, and everything the driver needs to feed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distensor.core.errors import BatchError, CaptureError
from distensor.program.batch import Batch, difference, flatten
from distensor.program.calls import DTYPES
from distensor.program.capturing import Captured
from distensor.program.expressions import Size, evaluate, names, show
from distensor.program.placement import Placement, place
from distensor.program.stage_program import StageProgram
from distensor.program.values import (
    InputSpec,
    Node,
    Ref,
    Source,
    ValueSpec,
    WeightRef,
    WeightSpec,
    sizes_in,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedGroup:
    """A parameter that lives in several stages: their gradients are summed."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The stages of a module."""

    captured: Captured
    programs: tuple[StageProgram, ...]
    tied: tuple[TiedGroup, ...]

    @property
    def batch_inputs(self) -> tuple[ValueSpec, ...]:
        """The tensors of the user's batch, by flat name, with the shapes they were captured with."""
        return self.captured.inputs

    def weights(self, stage: int) -> dict[str, Tensor]:
        """Parameters, buffers and constants of a stage as the module holds them now.

        Raises:
            CaptureError: one of them changed its dtype or shape since capture.
        """
        program = self.programs[stage]
        return {spec.name: self._weight(spec) for spec in (*program.parameters, *program.buffers)}

    def _weight(self, spec: WeightSpec) -> Tensor:
        constant = self.captured.constants.get(spec.name)
        if constant is not None:
            return constant
        if spec.name in self.captured.parameters:
            value = self.captured.module.get_parameter(spec.name).detach()
        else:
            value = self.captured.module.get_buffer(spec.name).detach()
        layout = self.captured.layouts.get(spec.name)
        shape = spec.shape if layout is None else layout.shape
        if DTYPES.get(value.dtype) is not spec.dtype or tuple(value.shape) != shape:
            raise CaptureError(
                f"{spec.name!r} is {value.dtype} {list(value.shape)} now and was {spec.dtype} {list(shape)} "
                "when the module was captured; convert the module before building the Trainer"
            )
        return value if layout is None else layout.take(value, self._tensor_rank)

    @property
    def _tensor_rank(self) -> int:
        return next((axis.rank for axis in self.captured.axes if axis.name == "tp"), 0)

    def flatten_batch(self, batch: Batch) -> dict[str, Tensor]:
        """The tensors of a batch by flat name, checked against what was captured.

        Raises:
            BatchError: other keys, another dtype, or sizes that this graph was not captured for.
        """
        structure, tensors = flatten(batch)
        problem = difference(self.captured.structure, structure)
        if problem is not None:
            raise BatchError(f"{problem}: a batch must look like the first one")
        self._check_tensors(tensors)
        return tensors

    def _check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        sizes = self._bind(tensors)
        for dim in self.captured.dims:
            size = sizes[dim.name]
            if size < dim.minimum or (dim.maximum is not None and size > dim.maximum):
                most = "any size" if dim.maximum is None else dim.maximum
                raise BatchError(f"{dim.name} is {size}; the module was captured for {dim.minimum} to {most}")
        for spec in self.captured.inputs:
            shape = tensors[spec.name].shape
            for index, extent in enumerate(spec.shape):
                expected = evaluate(extent, sizes)
                if expected != shape[index]:
                    reason = f"{show(extent)} = {expected}" if isinstance(extent, Size) else f"{extent}, as captured"
                    raise BatchError(f"{spec.name!r} has shape {list(shape)}; dim {index} must be {reason}")
        self._check_guards({name: tuple(value.shape) for name, value in tensors.items()})

    def _bind(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for spec in self.captured.inputs:
            value = tensors[spec.name]
            if DTYPES.get(value.dtype) is not spec.dtype or value.ndim != len(spec.shape):
                raise BatchError(
                    f"{spec.name!r} is {value.dtype} with {value.ndim} dims; "
                    f"captured as {spec.dtype} with {len(spec.shape)} dims"
                )
            for extent, size in zip(spec.shape, value.shape, strict=True):
                if isinstance(extent, Size) and isinstance(extent.tree, str):
                    sizes.setdefault(extent.tree, size)
        return sizes

    def _check_guards(self, shapes: Mapping[str, Sequence[int]]) -> None:
        for guard in self.captured.guards:
            if not guard.holds(shapes):
                raise BatchError(
                    f"the module takes another path for these sizes: the captured graph needs {guard.text}, "
                    f"got { ({name: list(shape) for name, shape in shapes.items()}) }"
                )

    def split_rows(self, tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """Cut a flat batch into parts of these numbers of rows; tensors without rows go to every part."""
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        rowed = {spec.name for spec in self.batch_inputs if spec.shape and isinstance(spec.shape[0], Size)}
        return [
            {name: value[start : start + size] if name in rowed else value for name, value in tensors.items()}
            for start, size in zip(starts, sizes, strict=True)
        ]


def cut(captured: Captured, stages: Mapping[str, int] | None = None) -> Cut:
    """Cut along `stages`: parameter or module FQN -> stage number. None or empty keeps one stage.

    Raises:
        StageMappingError: parameters without a stage, empty stages, stages out of order.
    """
    placement = place(captured, stages or {})
    programs = _Cutter(captured, placement).programs()
    return Cut(captured=captured, programs=programs, tied=_tied(programs))


def _tied(programs: Sequence[StageProgram]) -> tuple[TiedGroup, ...]:
    holders: dict[str, list[int]] = {}
    for program in programs:
        for spec in program.parameters:
            holders.setdefault(spec.name, []).append(program.stage)
    return tuple(TiedGroup(name=name, stages=tuple(found)) for name, found in holders.items() if len(found) > 1)


class _Cutter:
    def __init__(self, captured: Captured, placement: Placement) -> None:
        self._captured = captured
        self._placement = placement
        self._nodes = captured.nodes
        self._maker = {name: index for index, node in enumerate(self._nodes) for name in node.out if name is not None}
        self._members = [self._closure(stage) for stage in range(placement.stages)]
        self._reach = self._last_uses()

    def programs(self) -> tuple[StageProgram, ...]:
        return tuple(self._program(stage) for stage in range(self._placement.stages))

    def _wanted(self, stage: int) -> list[str]:
        return [self._captured.loss, self._captured.weight] if stage == self._placement.stages - 1 else []

    def _closure(self, stage: int) -> list[int]:
        """Nodes of a stage in order: its own, and the glue that they need."""
        members = {index for index, found in enumerate(self._placement.stage_of) if found == stage}
        needed = [name for index in members for name in _values(self._nodes[index])] + self._wanted(stage)
        while needed:
            index = self._maker.get(needed.pop())
            if index is not None and index not in members and self._placement.stage_of[index] is None:
                members.add(index)
                needed.extend(_values(self._nodes[index]))
        return sorted(members)

    def _last_uses(self) -> dict[str, int]:
        """Value made by a stage -> the last stage that uses it."""
        reach: dict[str, int] = {}
        for stage, members in enumerate(self._members):
            used = [name for index in members for name in _values(self._nodes[index])] + self._wanted(stage)
            for name in used:
                if self._home(name) is not None:
                    reach[name] = stage
        return reach

    def _home(self, name: str) -> int | None:
        index = self._maker.get(name)
        return None if index is None else self._placement.stage_of[index]

    def _crossing(self, border: int) -> list[ValueSpec]:
        """What goes from stage `border` to the next, in the order of the graph."""
        found = [name for name, last in self._reach.items() if (self._home(name) or 0) <= border < last]
        return [self._spec(name) for name in sorted(found, key=lambda name: (self._maker[name], name))]

    def _spec(self, name: str) -> ValueSpec:
        info = self._captured.values[name]
        return ValueSpec(name=name, dtype=info.dtype, shape=info.shape, requires_grad=info.requires_grad)

    def _program(self, stage: int) -> StageProgram:
        nodes = tuple(self._nodes[index] for index in self._members[stage])
        last = stage == self._placement.stages - 1
        outputs = () if last else tuple(self._crossing(stage))
        previous = self._crossing(stage - 1) if stage else []
        parameters, buffers = self._weights(stage, nodes)
        dims = self._dims(nodes, [*outputs, *previous])
        inputs = (
            *(InputSpec(value=spec, source=Source.BATCH) for spec in self._batch(nodes, dims, previous)),
            *(InputSpec(value=spec, source=Source.PREVIOUS) for spec in previous),
        )
        return StageProgram(
            stage=stage,
            stages=self._placement.stages,
            dims=tuple(dim for dim in self._captured.dims if dim.name in _dims_of_inputs(inputs) | dims),
            inputs=inputs,
            outputs=outputs,
            parameters=parameters,
            buffers=buffers,
            nodes=nodes,
            loss=self._captured.loss if last else None,
            weight=self._captured.weight if last else None,
            axes=self._captured.axes,
        )

    def _weights(self, stage: int, nodes: Sequence[Node]) -> tuple[tuple[WeightSpec, ...], tuple[WeightSpec, ...]]:
        """Those that the stage uses, and parameters that nothing uses in their home stage."""
        used = {item.name for node in nodes for item in node.references() if isinstance(item, WeightRef)}
        anywhere = {item.name for node in self._nodes for item in node.references() if isinstance(item, WeightRef)}
        idle = {name for name, home in self._placement.homes.items() if home == stage and name not in anywhere}
        parameters = tuple(spec for name, spec in self._captured.parameters.items() if name in used | idle)
        buffers = tuple(spec for name, spec in self._captured.buffers.items() if name in used)
        return parameters, buffers

    def _dims(self, nodes: Sequence[Node], specs: Sequence[ValueSpec]) -> set[str]:
        sizes = [size for node in nodes for value in node.args.values() for size in sizes_in(value)]
        extents = [extent for spec in specs for extent in spec.shape]
        return {name for extent in (*sizes, *extents) for name in names(extent)}

    def _batch(self, nodes: Sequence[Node], dims: set[str], previous: Sequence[ValueSpec]) -> list[ValueSpec]:
        """Tensors of the batch that the stage uses, or needs to learn the size of a dim."""
        used = {name for node in nodes for name in _values(node)}
        chosen = [spec for spec in self._captured.inputs if spec.name in used]
        known = set(_plain_dims([*chosen, *previous]))
        for spec in self._captured.inputs:
            if spec not in chosen and (set(_plain_dims([spec])) & dims) - known:
                chosen.append(spec)
                known.update(_plain_dims([spec]))
        return chosen


def _values(node: Node) -> Iterator[str]:
    return (reference.name for reference in node.references() if isinstance(reference, Ref))


def _plain_dims(specs: Sequence[ValueSpec]) -> Iterator[str]:
    for spec in specs:
        for extent in spec.shape:
            if isinstance(extent, Size) and isinstance(extent.tree, str):
                yield extent.tree


def _dims_of_inputs(inputs: Sequence[InputSpec]) -> set[str]:
    return {name for spec in inputs for extent in spec.shape for name in names(extent)}
