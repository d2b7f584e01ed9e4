"""torch.distributed over the data plane: the c10d backend "distensor".

`torch.distributed.new_group`, DeviceMesh, functional collectives with autograd and FSDP2 run on it unchanged. Each
group runs its collectives in the order they were called, in a thread of its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore

from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.errors import ConfigError
from distensor.transport.group import BACKEND, TransportGroup
from distensor.transport.plane import DataPlane
from distensor.transport.works import seconds_of

DEFAULT_TIMEOUT = timedelta(minutes=5)
_FOR_EVER = 10 * 365 * 86400.0
_JOIN = 10.0


@dataclass(frozen=True, slots=True)
class _World:
    """What the backend is to use: torch calls it with names and numbers only."""

    plane: DataPlane
    clock: Clock


_lock = threading.Lock()
_world: _World | None = None


def init_process_group(
    plane: DataPlane,
    rank: int,
    world_size: int,
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Make torch.distributed's default group of all ranks of the mesh, over `plane`. No store, no rendezvous: everybody
    is connected already. The plane stays the caller's.

    Raises:
        ConfigError: torch.distributed is initialised already, or the plane does not reach all ranks.
    """
    global _world
    if dist.is_initialized():
        raise ConfigError("torch.distributed is initialised already; call destroy_process_group() first")
    missing = set(range(world_size)) - plane.peers - {rank}
    if missing or rank != plane.me.rank:
        raise ConfigError(
            f"rank {rank} of {world_size} cannot use the data plane of rank {plane.me.rank} with the peers "
            f"{sorted(plane.peers)}"
        )
    _register()
    with _lock:
        _world = _World(plane, clock)
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world_size, timeout=timeout)


def destroy_process_group() -> None:
    """End all groups and their threads. Does nothing where there is none."""
    global _world
    known: list[Any] = list(dist.distributed_c10d._world.pg_map)
    groups = [group for group in known if isinstance(group, TransportGroup)]
    if dist.is_initialized():
        dist.destroy_process_group()
    for group in groups:
        group.join(_JOIN)
    with _lock:
        _world = None


def _register() -> None:
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, _: Any) -> TransportGroup:
    """torch calls this for the default group and for every new one."""
    if _world is None:
        raise ConfigError(
            "the backend 'distensor' needs a data plane: call distensor.transport.c10d.init_process_group"
        )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    timeout = seconds_of(options.timeout)
    return TransportGroup(
        _world.plane,
        ranks,
        options.group_rank,
        name=str(options.group_id),
        timeout=_FOR_EVER if timeout is None else timeout,
        clock=_world.clock,
    )
