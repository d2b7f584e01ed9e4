"""Module and loss -> one graph of table operations, by torch.export in training mode with dynamic sizes."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from distensor.core.compute import Precision
from distensor.core.errors import BatchError, CaptureError
from distensor.core.layouts import WeightLayout
from distensor.program.batch import Batch, Loss, Structure, Wrapper, flatten
from distensor.program.builder import GraphBuilder, Info, Place
from distensor.program.calls import DTYPES
from distensor.program.guards import Guard, parse_guards
from distensor.program.losses import LossWeight, find_weight
from distensor.program.lowering import Lowering
from distensor.program.precision import check_traced_dtypes
from distensor.program.sizes import SizeReader, name_dims
from distensor.program.values import (
    AxisSpec,
    Dim,
    DType,
    InputSpec,
    Node,
    ProgramData,
    Ref,
    Source,
    ValueSpec,
    WeightSpec,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A module as a graph that can be cut into stages; it keeps the module to read weights from."""

    module: nn.Module
    structure: Structure
    dims: tuple[Dim, ...]
    inputs: tuple[ValueSpec, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, Info]
    parameters: Mapping[str, WeightSpec]
    buffers: Mapping[str, WeightSpec]
    constants: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    """Every parameter name -> the one that its tensor is known by (the first)."""
    loss: str
    weight: str
    guards: tuple[Guard, ...]
    axes: tuple[AxisSpec, ...] = ()
    """Where this is one of several graphs that together are the module (partitioning)."""
    layouts: Mapping[str, WeightLayout] = field(default_factory=dict)
    """Weights of which this graph holds its part of the axis tp."""


def capture(
    module: nn.Module,
    example: Batch,
    *,
    loss: Loss | None = None,
    loss_weight: LossWeight = None,
    precision: Precision = Precision.FP32,
) -> Captured:
    """Capture `module` and its loss on an example batch.

    `precision` bf16 gives the graph of the module under autocast (see `distensor.program.precision`); its loss is
    float32.

    `loss_weight` tells what the loss is the mean over, where that cannot be found: "rows" of the batch, or
    callable(batch) -> number of elements as a tensor.

    Raises:
        CaptureError: what cannot become a stage program, with the module's name and the reason.
        BatchError: the example is no batch of tensors, or gives no loss.
    """
    if not module.training:
        raise CaptureError("the module is in eval mode; call module.train() before training it")
    structure, tensors = flatten(example)
    _check_example(tensors)
    count = loss_weight if callable(loss_weight) else None
    wrapper = Wrapper(module, structure, tuple(tensors), loss, count)
    autocast = precision is Precision.BF16
    if autocast:
        _check_devices(module)
    exported = _export(wrapper, _enlarged(tensors), autocast=autocast)
    lowering = Lowering(GraphBuilder(), SizeReader(), autocast=autocast)
    captured = _Capture(wrapper, exported, tensors, lowering).finish(None if callable(loss_weight) else loss_weight)
    if lowering.met_autocast:
        check_traced_dtypes(_whole(captured), {name: info.dtype for name, info in captured.values.items()})
    return captured


def _check_devices(module: nn.Module) -> None:
    """Autocast has another list for each kind of device; ours is that of the CPU, wherever the workers compute."""
    for name, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        if value.device.type != "cpu":
            raise CaptureError(
                f"precision='bf16' captures a module on the CPU and {name!r} is on {value.device}; "
                "call module.to('cpu') first: the workers choose their own devices"
            )


def _whole(captured: Captured) -> ProgramData:
    """The graph as one stage."""
    return ProgramData(
        stage=0,
        stages=1,
        dims=captured.dims,
        inputs=tuple(InputSpec(value=spec, source=Source.BATCH) for spec in captured.inputs),
        outputs=(),
        parameters=tuple(captured.parameters.values()),
        buffers=tuple(captured.buffers.values()),
        nodes=captured.nodes,
        loss=captured.loss,
        weight=captured.weight,
    )


def _check_example(tensors: Mapping[str, Tensor]) -> None:
    rows = {name: value.shape[0] for name, value in tensors.items() if value.ndim and value.shape[0] != 1}
    if len(set(rows.values())) > 1:
        raise BatchError(f"the tensors of a batch need the same number of rows (dim 0); got {rows}")
    for name, value in tensors.items():
        if value.dtype not in DTYPES:
            raise BatchError(f"{name!r} of the batch is {value.dtype}; supported are {', '.join(DTYPES.values())}")
        if value.numel() == 0:
            raise BatchError(f"{name!r} of the batch is empty: shape {list(value.shape)}")


def _enlarged(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Copies with two rows at least: torch.export takes a size of 1 for a constant, and one tensor given twice for
    one input (labels=input_ids), which it is not in every batch.
    """
    if any(value.ndim and value.shape[0] > 1 for value in tensors.values()):
        return [value.detach().clone() for value in tensors.values()]
    return [torch.cat([value, value]) if value.ndim else value.clone() for value in tensors.values()]


def _export(wrapper: Wrapper, tensors: list[Tensor], *, autocast: bool) -> torch.export.ExportedProgram:
    sequences = {value.shape[1] for value in tensors if value.ndim > 1 and not value.is_floating_point()}
    dynamic = tuple(_dynamic_dims(value, sequences) for value in tensors)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            warnings.simplefilter("ignore")  # export warns about its own internals
            return torch.export.export(wrapper, tuple(tensors), dynamic_shapes=(dynamic,), strict=False)
    except (CaptureError, BatchError):
        raise
    except Exception as error:  # export runs the user's forward and its own passes: any type may come
        raise CaptureError(_explain(error)) from error


def _dynamic_dims(value: Tensor, sequences: set[int]) -> dict[int, Any]:
    """Every size may vary unless the module fixes it, but pictures (reals of four dims and more) keep theirs.

    Reasoning about windows and strides of unknown pictures takes torch.export minutes; masks of four dims are told
    apart by having the length of a sequence.
    """
    picture = value.ndim >= 4 and value.is_floating_point()
    return {
        dim: torch.export.Dim.AUTO
        if size != 1 and (dim == 0 or not picture or size in sequences)
        else torch.export.Dim.STATIC
        for dim, size in enumerate(value.shape)
    }


_DATA_DEPENDENT = re.compile(r"data-dependent|DataDependent|GuardOnDataDependent|Could not (?:guard|extract)")
_CALLER = re.compile(r"\(([^()\n]+\.py:\d+ in \w+)\)")


def _explain(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    place = _CALLER.search(text)
    where = f" at {place[1]}" if place else ""
    if _DATA_DEPENDENT.search(text):
        return (
            f"control flow or a size depends on the values of a tensor{where}; a stage program is one fixed graph: "
            f"use torch.where or masks instead of if and loops over values ({_first_line(error)})"
        )
    return f"the module cannot be captured{where}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


class _Capture:
    """From an ExportedProgram to a Captured."""

    def __init__(self, wrapper: Wrapper, exported: Any, example: Mapping[str, Tensor], lowering: Lowering) -> None:
        self._wrapper = wrapper
        self._module: nn.Module = wrapper.module
        self._exported = exported
        self._example = example
        self._lowering = lowering
        self._sizes = lowering.sizes
        self._builder = lowering.builder
        self._parameters: dict[str, WeightSpec] = {}
        self._buffers: dict[str, WeightSpec] = {}
        self._constants: dict[str, Tensor] = {}
        self._inputs: list[ValueSpec] = []
        self._aliases = parameter_aliases(self._module)

    def finish(self, loss_weight: Literal["rows"] | None) -> Captured:
        values = self._placeholders()
        result, *rest = self._lowering.run(self._exported.graph_module, values)
        if not isinstance(result, Place):
            raise CaptureError("the loss does not depend on the batch or the parameters")
        loss = self._builder.read(result)
        if not isinstance(loss, Ref) or not self._builder.info(loss).requires_grad:
            raise CaptureError("the loss depends on no parameter that requires a gradient")
        self._builder.module = ""
        loss = self._in_float32(loss)
        weight = find_weight(self._builder, loss, self._read(rest[0]) if rest else loss_weight)
        nodes = live_nodes(self._builder.nodes, {loss.name, weight.name})
        return Captured(
            module=self._module,
            structure=self._wrapper.structure,
            dims=self._dims(),
            inputs=tuple(self._inputs),
            nodes=nodes,
            values=self._builder.values,
            parameters=self._parameters,
            buffers=self._buffers,
            constants=self._constants,
            aliases=self._aliases,
            loss=loss.name,
            weight=weight.name,
            guards=parse_guards(self._exported, self._wrapper.names),
        )

    def _in_float32(self, loss: Ref) -> Ref:
        """What is multiplied by the number of elements and summed over the batch must not be rounded to 8 bits."""
        info = self._builder.info(loss)
        if info.dtype.itemsize >= 4:
            return loss
        wide = Info(dtype=DType.FLOAT32, shape=info.shape, requires_grad=True)
        return self._builder.emit_one("aten.to.dtype", {"self": loss, "dtype": wide.dtype.value}, wide, "loss")

    def _read(self, bound: Any) -> Ref:
        name = self._builder.read(bound) if isinstance(bound, Place) else None
        if not isinstance(name, Ref):
            raise CaptureError("loss_weight(batch) does not depend on the batch")
        return name

    def _placeholders(self) -> dict[Any, Any]:
        nodes = [node for node in self._exported.graph.nodes if node.op == "placeholder"]
        specs = list(self._exported.graph_signature.input_specs)
        pairs = list(zip(nodes, specs, strict=True))
        batch = [node for node, spec in pairs if spec.kind is InputKind.USER_INPUT]
        shapes = {name: tuple(node.meta["val"].shape) for name, node in zip(self._wrapper.names, batch, strict=True)}
        name_dims(shapes, self._sizes)
        bound = {
            node: Place(self._weight(spec), is_weight=True)
            for node, spec in pairs
            if spec.kind is not InputKind.USER_INPUT
        }
        for name, node in zip(self._wrapper.names, batch, strict=True):
            bound[node] = Place(self._input(name, node.meta["val"]))
        return bound

    def _input(self, name: str, value: Tensor) -> Ref:
        shape = tuple(self._lowering.extent(size) for size in value.shape)
        rows = max((tensor.shape[0] for tensor in self._example.values() if tensor.ndim), default=1)
        if value.ndim and isinstance(shape[0], int) and shape[0] != 1 and rows >= 1:
            raise CaptureError(
                f"the module fixes the number of rows of {name!r} to {shape[0]}; micro-batches need it to vary: "
                "use x.shape[0] instead of a constant"
            )
        spec = ValueSpec(name=name, dtype=DTYPES[value.dtype], shape=shape)
        self._inputs.append(spec)
        self._builder.values[name] = Info(dtype=spec.dtype, shape=shape, requires_grad=False)
        return Ref(name)

    def _weight(self, spec: Any) -> Any:
        target = str(spec.target).removeprefix("module.")
        if spec.kind is InputKind.PARAMETER:
            return self._add(self._parameters, self._aliases[target], self._module.get_parameter(target))
        if spec.kind is InputKind.BUFFER:
            return self._add(self._buffers, target, self._module.get_buffer(target))
        if spec.kind is InputKind.CONSTANT_TENSOR:
            value = self._exported.constants[spec.target]
            name = f"constant.{target}"
            self._constants[name] = value
            return self._add(self._buffers, name, value)
        raise CaptureError(
            f"the module uses {target!r}, an object that is no tensor (a torch.Generator, for example); "
            "only tensors can be shipped, and random draws follow the seed of the Trainer"
        )

    def _add(self, kept: dict[str, WeightSpec], name: str, value: Tensor) -> Any:
        if value.dtype not in DTYPES:
            raise CaptureError(f"{name!r} is {value.dtype}; supported are {', '.join(DTYPES.values())}")
        needs = value.requires_grad and kept is self._parameters
        spec = WeightSpec(name=name, dtype=DTYPES[value.dtype], shape=tuple(value.shape), requires_grad=needs)
        kept[name] = spec
        return self._builder.add_weight(spec)

    def _dims(self) -> tuple[Dim, ...]:
        found: dict[str, list[tuple[int, int | None]]] = {}
        for symbol, limits in self._exported.range_constraints.items():
            name = self._sizes.dims.get(str(symbol))
            if name is not None:
                found.setdefault(name, []).append((int(limits.lower), _upper(limits)))
        return tuple(self._dim(name, found.get(name, [])) for name in dict.fromkeys(self._sizes.dims.values()))

    def _dim(self, name: str, limits: list[tuple[int, int | None]]) -> Dim:
        lows = [low for low, _ in limits]
        highs = [high for _, high in limits if high is not None]
        low = max(lows, default=0)
        # 2 is how torch.export says "not a constant": a size of 1 runs through the same operations.
        return Dim(
            name=name,
            minimum=1 if low <= 2 else low,
            maximum=min(highs) if highs else None,
            example=self._example_size(name),
        )

    def _example_size(self, name: str) -> int:
        for spec in self._inputs:
            for extent, size in zip(spec.shape, self._example[spec.name].shape, strict=True):
                if getattr(extent, "tree", None) == name:
                    return int(size)
        raise CaptureError(f"dim {name!r} is in no tensor of the batch")


def _upper(limits: Any) -> int | None:
    return int(limits.upper) if getattr(limits.upper, "is_Integer", isinstance(limits.upper, int)) else None


def parameter_aliases(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in module.named_parameters(remove_duplicate=False)}


def live_nodes(nodes: list[Node], wanted: set[str]) -> tuple[Node, ...]:
    """Only the nodes that the wanted values need, with unused results marked None."""
    needed = set(wanted)
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(name in needed for name in node.out):
            kept.append(node)
            needed.update(reference.name for reference in node.references() if isinstance(reference, Ref))
    return tuple(_trim(node, needed) for node in reversed(kept))


def _trim(node: Node, needed: set[str]) -> Node:
    out = tuple(name if name in needed else None for name in node.out)
    if out == node.out:
        return node
    return Node(op=node.op, args=node.args, out=out, module=node.module, site=node.site)
