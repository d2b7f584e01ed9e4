"""StageProgram as data: what a worker is asked to run. No torch here, and nothing that could be code.

Values (batch inputs, what the previous stage sent, results of nodes) and weights (parameters, buffers,
constants) are two name spaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from distensor.program.expressions import Extent, Size

FORMAT_VERSION = 1


class DType(StrEnum):
    """Element types that may cross a border or be computed with."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether values of this type can carry a gradient."""
        return self.value.startswith(("float", "bfloat", "complex"))


_ITEMSIZE: Mapping[DType, int] = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
}


class Source(StrEnum):
    """Where an input of a stage comes from."""

    BATCH = "batch"
    PREVIOUS = "previous"


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by name."""

    name: str


@dataclass(frozen=True, slots=True)
class WeightRef:
    """A parameter, buffer or constant by name."""

    name: str


Argument: TypeAlias = "bool | int | float | str | Ref | WeightRef | Size | tuple[Argument, ...] | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A named size of the batch. `example` is what it was at capture; `maximum` None means any."""

    name: str
    minimum: int
    maximum: int | None
    example: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSpec:
    """A tensor whose shape may depend on dims."""

    name: str
    dtype: DType
    shape: tuple[Extent, ...]
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """A value that a stage receives."""

    value: ValueSpec
    source: Source

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def shape(self) -> tuple[Extent, ...]:
        return self.value.shape

    @property
    def requires_grad(self) -> bool:
        return self.value.requires_grad


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """A parameter, buffer or constant of a stage."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSpec:
    """The program is for this rank of an axis ("tp" or "cp") that holds several programs of one stage."""

    name: str
    size: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One operation of the table. `out` holds None where a result of several is not used.

    `site` numbers the places that draw random numbers, the same in every cut of a module.
    """

    op: str
    args: Mapping[str, Argument]
    out: tuple[str | None, ...]
    module: str = ""
    site: int | None = None

    def references(self) -> Iterator[Ref | WeightRef]:
        for argument in self.args.values():
            yield from _references(argument)


def _references(argument: Argument) -> Iterator[Ref | WeightRef]:
    if isinstance(argument, (Ref, WeightRef)):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _references(item)


def sizes_in(argument: Argument) -> Iterator[Size]:
    """Every size expression inside an argument."""
    if isinstance(argument, Size):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from sizes_in(item)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a program may ask of the worker that checks it; beyond it, ProgramRejectedError.

    Checking a program within the defaults takes at most a few seconds and less than 200 MB, whatever it holds.
    """

    max_json_bytes: int = 8 << 20
    max_nodes: int = 50_000
    max_list: int = 4096
    """Entries of one list: dims of a shape, tensors joined or split."""
    max_bytes: int = 16 << 30
    """Weights plus everything that one forward pass allocates."""
    max_work: float = 1e16
    """Elements read and written plus multiply-adds of one forward pass."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramData:
    """One stage of a module: inputs, weights, operations in order, outputs.

    `outputs` go to the next stage, whose inputs from `Source.PREVIOUS` have the same names in the same order.
    The last stage has `loss` and `weight` instead.
    """

    stage: int
    stages: int
    dims: tuple[Dim, ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[ValueSpec, ...]
    parameters: tuple[WeightSpec, ...]
    buffers: tuple[WeightSpec, ...]
    nodes: tuple[Node, ...]
    loss: str | None = None
    weight: str | None = None
    axes: tuple[AxisSpec, ...] = ()
    version: int = field(default=FORMAT_VERSION)

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def weight_bytes(self) -> int:
        return sum(weight_bytes(spec) for spec in (*self.parameters, *self.buffers))

    @property
    def results(self) -> tuple[str, ...]:
        """Everything that a forward pass gives back, by name."""
        last = [name for name in (self.loss, self.weight) if name is not None]
        return (*(spec.name for spec in self.outputs), *last)

    def inputs_from(self, source: Source | str) -> tuple[InputSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.source == source)


def weight_bytes(spec: WeightSpec) -> int:
    size = spec.dtype.itemsize
    for extent in spec.shape:
        size *= extent
    return size
