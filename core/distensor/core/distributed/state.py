"""The process groups of the mesh: made once, found by axes, really destroyed.

A group exists along every combination of axes that training uses. Which ranks form it is `RankLayout`'s business.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from distensor.core.distributed.agreement import Call, agree, check_member, check_same, set_timeout
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.parallel import DEFAULT_ORDER, Axis, ParallelConfig, RankLayout

Axes: TypeAlias = frozenset[Axis]

TP, CP, PP, DP = (frozenset({axis}) for axis in (Axis.TP, Axis.CP, Axis.PP, Axis.DP))
COMBINATIONS: tuple[Axes, ...] = (DP, CP, TP, PP, DP | CP, TP | CP, TP | PP, TP | DP, TP | CP | DP)
NAMES: Mapping[Axes, str] = {
    DP: "data parallel",
    CP: "context parallel",
    TP: "tensor model parallel",
    PP: "pipeline model parallel",
    DP | CP: "data parallel with context parallel",
    TP | CP: "tensor model parallel with context parallel",
    TP | PP: "model parallel",
    TP | DP: "tensor and data parallel",
    TP | CP | DP: "tensor and data parallel with context parallel",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallel:
    """The mesh of this process and its groups in it."""

    world: dist.ProcessGroup
    layout: RankLayout
    rank: int
    groups: Mapping[Axes, dist.ProcessGroup]
    first_and_last: dist.ProcessGroup | None
    """First and last rank of the pipeline; None on the ranks between them."""

    def ranks(self, axes: Axes) -> list[int]:
        """World ranks of this process's group along `axes`."""
        return list(self.layout.group_of(self.rank, *axes))


@dataclass(slots=True)
class _Holder:
    """The one mesh of the process: its groups belong to torch's one default group."""

    current: ModelParallel | None = None


_holder = _Holder()


def current() -> ModelParallel | None:
    """The mesh, unless its default group is gone: then its groups are gone with it."""
    state = _holder.current
    alive = state is not None and dist.is_initialized() and dist.group.WORLD is state.world
    return state if alive else None


def initialize_model_parallel(
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
) -> None:
    """Make the process groups of a mesh over torch.distributed's default group; every rank must call it.

    What the three sizes leave of the world is the data-parallel axis. Each axis gets groups of its own, also one of
    size 1 and one that holds the whole world, so a group can be destroyed without touching another.

    Args:
        nccl_communicator_config_path: not implemented, only None is accepted.
        distributed_timeout_minutes: for operations on the groups.
        order: the axes of the mesh, fastest varying first.

    Raises:
        ConfigError: there is no default group, a mesh exists already, or the sizes do not fit the world.
        GroupMismatchError: other arguments on some rank; on every rank, before any group is made.
    """
    if nccl_communicator_config_path is not None:
        raise UnsupportedOptionError(
            f"nccl_communicator_config_path={nccl_communicator_config_path!r} is not implemented in this version; "
            "pass None"
        )
    world = check_member(dist.group.WORLD)
    state = current()
    if state is not None:
        raise ConfigError(
            f"model parallel is initialized already ({state.layout.config.describe()}); call "
            "destroy_model_parallel() first"
        )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    config = _agreed_config(world, tp_size, pp_size, cp_size, order)
    _holder.current = _make(world, RankLayout(config), timeout)


def destroy_model_parallel(destroy_process_groups: bool = True) -> None:
    """Forget the mesh and destroy its groups, or only forget it. The default group stays. Does nothing twice."""
    state, _holder.current = current(), None
    if state is not None and destroy_process_groups:
        first_and_last = () if state.first_and_last is None else (state.first_and_last,)
        _destroy([*state.groups.values(), *first_and_last])


def model_parallel_is_initialized() -> bool:
    return current() is not None


def _agreed_config(world: dist.ProcessGroup, tp: int, pp: int, cp: int, order: str) -> ParallelConfig:
    """The mesh that all ranks want."""

    def described() -> Call:
        _config(tp, pp, cp, order, world.size())
        return {"tp_size": tp, "pp_size": pp, "cp_size": cp, "order": order}

    calls = agree(world, "initialize_model_parallel", described)
    for name in calls[0]:
        check_same(world, calls, name, f"{name} differs")
    return _config(tp, pp, cp, order, world.size())


def _config(tp: int, pp: int, cp: int, order: str, world_size: int) -> ParallelConfig:
    asked = ParallelConfig(tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp, order=order)
    if world_size % asked.world_size != 0:
        near = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigError(
            f"world_size ({world_size}) is not divisible by tp_size ({tp}) x pp_size ({pp}) x cp_size ({cp}); "
            f"expected a product of {', '.join(map(str, near))}"
        )
    return ParallelConfig(
        data_parallel=world_size // math.prod((tp, pp, cp)),
        tensor_parallel=tp,
        pipeline_parallel=pp,
        context_parallel=cp,
        order=order,
    )


def _make(world: dist.ProcessGroup, layout: RankLayout, timeout: timedelta) -> ModelParallel:
    """All groups, or none: what was made before a failure is destroyed again."""
    rank = world.rank()
    made: list[dist.ProcessGroup] = []
    with _undone_on_failure(made):
        groups = {axes: _own_group(layout.groups(*axes), rank, timeout, made) for axes in COMBINATIONS}
        ends = [sorted({group[0], group[-1]}) for group in layout.groups(Axis.PP)]
        first_and_last = _own_group(ends, rank, timeout, made)
    own = {axes: group for axes, group in groups.items() if group is not None}
    return ModelParallel(world=world, layout=layout, rank=rank, groups=own, first_and_last=first_and_last)


def _own_group(
    groups: list[list[Any]], rank: int, timeout: timedelta, made: list[dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    """Make all of `groups`, as torch wants of every rank; the one with this rank in it."""
    own = None
    for ranks in groups:
        group = dist.new_group([int(member) for member in ranks], timeout=timeout)
        if rank in ranks:
            own = group
            made.append(group)
            set_timeout(group, timeout)
    return own


@contextlib.contextmanager
def _undone_on_failure(made: list[dist.ProcessGroup]) -> Iterator[None]:
    try:
        yield
    except BaseException:  # the error goes on; only the groups are taken back
        _destroy(made)
        raise


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        dist.destroy_process_group(group)
