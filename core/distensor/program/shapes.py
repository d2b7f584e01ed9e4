"""The shape check: a program runs on the meta device, where nothing is allocated, and is accounted for.

It proves that every operation accepts what it is given, that results have the dtypes and shapes that the
program declares, and that bytes and work stay within the limits for these sizes of the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distensor.core.errors import ProgramRejectedError
from distensor.program.axes import meta_groups
from distensor.program.calls import DTYPES, TORCH_DTYPES, Call, resolve
from distensor.program.cost import check_result_count, node_work
from distensor.program.draws import Draws
from distensor.program.expressions import Extent, evaluate, show
from distensor.program.reading import clip
from distensor.program.values import DType, Limits, Node, ProgramData, Ref, ValueSpec, WeightRef

_META = torch.device("meta")
_ANY_SIZE = 1 << 62


def _place(node: Node) -> str:
    return f"{node.op} in {node.module!r}"


_SAME_DTYPE = frozenset(
    {"linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d"}
)
"""Products whose meta kernels take any mixture, where the real ones fail."""


def _check_dtypes(node: Node, tensors: Sequence[Tensor]) -> None:
    dtypes = {value.dtype for value in tensors}
    if len(dtypes) > 1 and node.op.split(".")[1] in _SAME_DTYPE:
        raise ProgramRejectedError(f"{_place(node)} mixes {', '.join(sorted(map(str, dtypes)))}; they must be the same")


def _meta(shape: Sequence[int], dtype: torch.dtype, where: str) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype, device=_META)
    except (RuntimeError, OverflowError) as error:
        raise ProgramRejectedError(f"{where}: no tensor can have the shape {clip(shape)}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What one forward pass takes: bytes of weights, bytes it allocates, elements and multiply-adds."""

    weight_bytes: int
    activation_bytes: int
    work: float


def check_shapes(program: ProgramData, limits: Limits, dims: Mapping[str, int] | None = None) -> Cost:
    """Run `program` on the meta device at these dims (default: those of the capture).

    Raises:
        ProgramRejectedError: naming the operation that fails, the result that differs or the limit exceeded.
    """
    sizes = {dim.name: dim.example for dim in program.dims} if dims is None else dims
    check = _Check(program, limits, sizes)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an operation warns about at run time says nothing about shapes
        return check.run()


def computed_dtypes(program: ProgramData) -> dict[str, DType]:
    """The dtype of every value of `program`, found by running it on the meta device at the dims of the capture.

    Raises:
        ProgramRejectedError: an operation that cannot run on what it is given.
    """
    values = _values(program, {dim.name: dim.example for dim in program.dims})
    return {name: DTYPES[value.dtype] for name, value in values.items()}


def computed_shapes(program: ProgramData, dims: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every value of `program` at these dims; as `computed_dtypes`."""
    return {name: tuple(value.shape) for name, value in _values(program, dims).items()}


def _values(program: ProgramData, dims: Mapping[str, int]) -> dict[str, Tensor]:
    check = _Check(program, Limits(max_bytes=_ANY_SIZE, max_work=math.inf), dims)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check.run()
    return check.values


class _Check:
    def __init__(self, program: ProgramData, limits: Limits, dims: Mapping[str, int]) -> None:
        self._program = program
        self._limits = limits
        self._dims = dims
        self.values: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._storages: dict[int, Tensor] = {}
        self._bytes = 0
        self._work = 0.0
        self._draws = Draws(_META)
        self._groups = meta_groups(program.axes)

    def run(self) -> Cost:
        program = self._program
        self._limit_bytes(program.weight_bytes, "its weights")
        for weight in (*program.parameters, *program.buffers):
            self._weights[weight.name] = _meta(weight.shape, TORCH_DTYPES[weight.dtype], weight.name)
        for spec in program.inputs:
            shape = [self._extent(extent, spec.name) for extent in spec.shape]
            self.values[spec.name] = self._account(_meta(shape, TORCH_DTYPES[spec.dtype], spec.name), spec.name)
        for node in program.nodes:
            self._run_node(node)
        self._check_results()
        return Cost(weight_bytes=program.weight_bytes, activation_bytes=self._bytes, work=self._work)

    def _extent(self, extent: Extent, where: str) -> int:
        value = evaluate(extent, self._dims)
        if not isinstance(value, int) or value < 0:
            raise ProgramRejectedError(f"{where}: size {show(extent)} is {value!r}, not a count")
        return value

    def _run_node(self, node: Node) -> None:
        call = Call(node, self._draws, _META, self._groups)
        arguments = [self._argument(value) for value in call.arguments]
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        _check_dtypes(node, tensors)
        check_result_count(node, tensors, self._dims, self._limits)
        try:
            results = call.function(*arguments)
        except Exception as error:  # meta kernels raise any type, and foreign bytes chose the arguments
            first = str(error).strip().splitlines()[:1]
            raise ProgramRejectedError(f"{_place(node)} cannot run on these shapes: {clip(''.join(first))}") from error
        self._keep(node, list(results) if isinstance(results, (list, tuple)) else [results], tensors)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.values[value.name]
        if isinstance(value, WeightRef):
            return self._weights[value.name]
        return resolve(value, self._dims)

    def _keep(self, node: Node, results: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        if len(results) != len(node.out):
            raise ProgramRejectedError(f"{_place(node)} gives {len(results)} results, not {len(node.out)}")
        for name, result in zip(node.out, results, strict=True):
            if not isinstance(result, Tensor) or result.dtype not in DTYPES or result.ndim > 32:
                raise ProgramRejectedError(f"{_place(node)} gives {clip(result)}, which is no tensor to compute with")
            if name is not None:
                self.values[name] = result
            self._account(result, _place(node))
        self._work += node_work(node, tensors, results, self._dims)
        if self._work > self._limits.max_work:
            raise ProgramRejectedError(
                f"{_place(node)}: the stage needs {self._work:.1e} operations; "
                f"the limit is {self._limits.max_work:.1e} (Limits.max_work)"
            )

    def _account(self, value: Tensor, where: str) -> Tensor:
        """Views share their storage, and it counts once; everything is kept, so no address comes twice."""
        storage = value.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = value
            self._bytes += storage.nbytes()
            self._limit_bytes(self._program.weight_bytes + self._bytes, where)
        return value

    def _limit_bytes(self, total: int, where: str) -> None:
        if total > self._limits.max_bytes:
            raise ProgramRejectedError(
                f"{where}: the stage needs {total} bytes; the limit is {self._limits.max_bytes} (Limits.max_bytes)"
            )

    def _check_results(self) -> None:
        for spec in self._program.outputs:
            self._check_output(spec)
        for name in (self._program.loss, self._program.weight):
            if name is not None and self.values[name].numel() != 1:
                raise ProgramRejectedError(f"{name!r} has {self.values[name].numel()} elements, not one")

    def _check_output(self, spec: ValueSpec) -> None:
        value = self.values[spec.name]
        declared = (spec.dtype, [self._extent(extent, spec.name) for extent in spec.shape])
        computed = (DTYPES[value.dtype], list(value.shape))
        if declared != computed:
            raise ProgramRejectedError(
                f"output {spec.name!r} is declared {declared[0]} {declared[1]} and computed {computed[0]} {computed[1]}"
            )
