"""Whether a mesh can carry a declaration, asked before any worker is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distensor.core import ParallelConfig, Unavailable
from distensor.core.control import DeviceKind, Mesh
from distensor.core.errors import ConfigError, MeshTooSmallError
from distensor.core.problems import Problems
from distensor.core.reading import Reading
from distensor.core.table import bytes_text
from distensor.program import DType, StageProgram, capture
from distensor.program.recomputation import check_recompute
from distensor.training.options import TrainerOptions
from distensor.training.pieces import MeshPieces

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.nn import DistributedModel
    from distensor.program.losses import LossWeight

LACKING: Mapping[DeviceKind, frozenset[DType]] = {DeviceKind.MPS: frozenset({DType.FLOAT64, DType.COMPLEX128})}
"""What torch's tensors on a device cannot be, whatever the operation: Metal has no double (pytorch issue 122602)."""
_INSTEAD: Mapping[DType, DType] = {DType.FLOAT64: DType.FLOAT32, DType.COMPLEX128: DType.COMPLEX64}


def admit(
    mesh: Reading[Mesh],
    model: DistributedModel,
    options: TrainerOptions,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    loss_weight: LossWeight,
) -> MeshPieces:
    """Capture and cut the model, and compare it with the mesh; of a job that may wait its size is not.

    Raises:
        UserError: what stands in the way; several things as one error with all of them.
    """
    problems = Problems()
    if not options.wait:
        problems.check(check_workers, options.parallel, mesh)
    pieces = problems.check(cut_for, model, options, batch, loss, loss_weight)
    if pieces is not None:
        if not options.wait:
            problems.check(check_memory, pieces.bytes_per_rank(), mesh)
        problems.check(check_dtypes, pieces.first.programs, mesh)
    problems.report()
    assert pieces is not None, "no problem was reported"
    return pieces


def cut_for(
    model: DistributedModel,
    options: TrainerOptions,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    loss_weight: LossWeight,
) -> MeshPieces:
    """The pieces of every rank.

    Raises:
        ConfigError, CaptureError, ShardingError, StageMappingError, BatchError: the model cannot be cut as declared.
    """
    captured = capture(model.module, batch, loss=loss, loss_weight=loss_weight, precision=options.precision)
    check_recompute(options.recompute, [node.module for node in captured.nodes])
    return MeshPieces.of(captured, model, options)


def check_workers(parallel: ParallelConfig, mesh: Reading[Mesh]) -> None:
    """Raise MeshTooSmallError unless every rank finds a free worker."""
    if isinstance(mesh, Unavailable) or not isinstance(parallel, ParallelConfig):
        return
    free, needed = mesh.available_workers, parallel.world_size
    if needed > free:
        away = sum(not node.connected for node in mesh.nodes)
        raise MeshTooSmallError(
            f"{parallel.describe()} = {needed} ranks, and the mesh has {free} free workers"
            f"{f' (known nodes that are not connected: {away})' if away else ''}: {_smaller(parallel, free)}"
        )


def check_memory(bytes_per_rank: Sequence[int], mesh: Reading[Mesh]) -> None:
    """Raise MeshTooSmallError where weights, gradients and optimizer alone are more than the mesh has.

    Activations come on top; what they take in the end depends on kernels, so nothing is refused for them.
    """
    if isinstance(mesh, Unavailable):
        return
    readings = [device.free_bytes for device in mesh.devices if device.unusable is None]
    free = [reading for reading in readings if not isinstance(reading, Unavailable)]
    if not free or len(free) < len(readings):
        return
    largest, total = max(bytes_per_rank), sum(bytes_per_rank)
    what = "weights, gradients and optimizer"
    more = "use more pipeline stages or more tensor_parallel, so that each rank holds less"
    if largest > max(free):
        raise MeshTooSmallError(
            f"rank {list(bytes_per_rank).index(largest)} needs {bytes_text(largest)} for {what}; the largest device "
            f"has {bytes_text(max(free))} free: {more}"
        )
    if total > sum(free):
        raise MeshTooSmallError(
            f"all ranks together need {bytes_text(total)} for {what}; the mesh has {bytes_text(sum(free))} free: lower "
            f"data_parallel, since each replica holds the whole model"
        )


def check_dtypes(programs: Sequence[StageProgram], mesh: Reading[Mesh]) -> None:
    """Raise ConfigError where a worker could be placed on a device that lacks a dtype of the model."""
    if isinstance(mesh, Unavailable):
        return
    for node in mesh.nodes:
        for device in node.info.devices:
            lacking = LACKING.get(device.kind, frozenset())
            if lacking and node.connected and device.slots > 0 and device.unusable is None:
                _check_lacking(programs, lacking, f"{device.name!r} of node {node.info.name!r} ({device.kind})")


def _check_lacking(programs: Sequence[StageProgram], lacking: frozenset[DType], device: str) -> None:
    for what, dtype in _dtypes_of(programs):
        if dtype in lacking:
            raise ConfigError(
                f"{what} is {dtype}, which {device} cannot compute with: use {_INSTEAD[dtype]}, or a mesh without "
                f"such devices"
            )


def _dtypes_of(programs: Sequence[StageProgram]) -> Iterator[tuple[str, DType]]:
    """What a model consists of, the things that a user has named first."""
    from distensor.program.shapes import computed_dtypes  # loads torch

    for program in programs:
        yield from ((f"parameter {spec.name!r}", spec.dtype) for spec in program.parameters)
        yield from ((f"buffer {spec.name!r}", spec.dtype) for spec in program.buffers)
        yield from ((f"{each.value.name!r} of the batch", each.value.dtype) for each in program.inputs)
    for program in programs:
        made = computed_dtypes(program)
        for node in program.nodes:
            yield from (
                (f"what {node.op!r} gives in module {node.module!r}", made[name]) for name in node.out if name in made
            )


def _smaller(parallel: ParallelConfig, free: int) -> str:
    replica = parallel.world_size // parallel.data_parallel
    if replica <= free:
        return f"lower data_parallel to {free // replica}, or connect {parallel.world_size - free} more workers"
    return f"one replica alone takes {replica}; lower the other axes to a product of at most {free}"
