"""Whether a mesh can carry a declaration, asked before any worker is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distensor.core import ParallelConfig, Unavailable
from distensor.core.control import Mesh
from distensor.core.errors import MeshTooSmallError
from distensor.core.problems import Problems
from distensor.core.reading import Reading
from distensor.core.table import bytes_text
from distensor.program import capture
from distensor.program.recomputation import check_recompute
from distensor.training.options import TrainerOptions
from distensor.training.pieces import MeshPieces

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.nn import DistributedModel
    from distensor.program.losses import LossWeight


def admit(
    mesh: Reading[Mesh],
    model: DistributedModel,
    options: TrainerOptions,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    loss_weight: LossWeight,
) -> MeshPieces:
    """Capture and cut the model, and compare it with the mesh.

    Raises:
        UserError: what stands in the way; several things as one error with all of them.
    """
    problems = Problems()
    problems.check(check_workers, options.parallel, mesh)
    pieces = problems.check(cut_for, model, options, batch, loss, loss_weight)
    if pieces is not None:
        problems.check(check_memory, pieces.bytes_per_rank(), mesh)
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


def _smaller(parallel: ParallelConfig, free: int) -> str:
    replica = parallel.world_size // parallel.data_parallel
    if replica <= free:
        return f"lower data_parallel to {free // replica}, or connect {parallel.world_size - free} more workers"
    return f"one replica alone takes {replica}; lower the other axes to a product of at most {free}"
