"""Joining the processes that a launcher such as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from distensor.core.distributed.agreement import named
from distensor.core.distributed.pipeline import init_pp_scheduler, pp_scheduler_is_initialized
from distensor.core.distributed.printing import print_rank_0
from distensor.core.distributed.state import current, initialize_model_parallel
from distensor.core.errors import ConfigError, TransportTimeoutError
from distensor.core.parallel import DEFAULT_ORDER


class EngineConfig(Protocol):
    """The settings that `dist_init` reads of a configuration object."""

    @property
    def distributed_backend(self) -> str: ...

    @property
    def distributed_timeout_minutes(self) -> float: ...

    @property
    def cp_size(self) -> int: ...

    @property
    def pp_size(self) -> int: ...


class Config(Protocol):
    @property
    def engine_config(self) -> EngineConfig: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """What the launcher says about this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    hosted: bool
    attempt: str


def dist_init(
    config: Config | None = None,
    *,
    backend: str | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    order: str = DEFAULT_ORDER,
    timeout_minutes: float = 30,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Join the processes of the launch, make the mesh, and its pipeline scheduler if there is more than one stage.

    Rank and number of processes are those of the launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), never the
    number of devices; without them the process is alone. What exists already is kept.

    Args:
        config: an object with `engine_config`, from which backend, timeout, cp_size and pp_size are taken instead.
        backend: None means gloo, and NCCL for CUDA tensors where every local process has a GPU of its own.

    Raises:
        ConfigError: the environment or the sizes do not fit.
        TransportTimeoutError: processes did not join in time, with their ranks.
    """
    if config is not None:
        engine = config.engine_config
        backend, timeout_minutes = engine.distributed_backend, engine.distributed_timeout_minutes
        cp_size, pp_size = engine.cp_size, engine.pp_size
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _join(_place(environment), backend, timeout)
    if current() is None:
        initialize_model_parallel(tp_size, pp_size, cp_size, None, timeout_minutes, order)
    if pp_size > 1 and not pp_scheduler_is_initialized():
        init_pp_scheduler()
    mesh = current()
    print_rank_0(f"torch.distributed: {dist.get_backend()}, {mesh.layout.config.describe() if mesh else ''}")


def _place(environment: Mapping[str, str]) -> _Place:
    rank, world_size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={world_size}: expected 0 to {world_size - 1}")
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise ConfigError(
            f"WORLD_SIZE={world_size}, but MASTER_ADDR and MASTER_PORT are not both set: expected those of rank 0"
        )
    return _Place(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", rank),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
        address=environment.get("MASTER_ADDR", ""),
        port=_number(environment, "MASTER_PORT", 0),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r}: expected an integer of at least 0")
    return int(text)


def _join(place: _Place, backend: str | None, timeout: timedelta) -> None:
    chosen = backend or _backend(place)
    if "nccl" in chosen:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    store = dist.HashStore() if place.world_size == 1 else _store(place, timeout)
    dist.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _backend(place: _Place) -> str:
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def _store(place: _Place, timeout: timedelta) -> dist.Store:
    """The launch's store, once all processes have said in it that they are there."""
    where = f"{place.address}:{place.port}"
    try:
        server = dist.TCPStore(
            place.address,
            place.port,
            place.world_size,
            place.rank == 0 and not place.hosted,
            timeout,
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise TransportTimeoutError(
            f"rank {place.rank} of {place.world_size}: no store at {where} within {timeout.total_seconds():g} s; is "
            f"rank 0 missing? {error}"
        ) from error
    store = dist.PrefixStore(f"distensor/{place.attempt}", server)
    _wait_for_all(store, place, timeout)
    return store


def _wait_for_all(store: dist.Store, place: _Place, timeout: timedelta) -> None:
    keys = [f"joined/{rank}" for rank in range(place.world_size)]
    try:
        store.set(keys[place.rank], "here")
        store.wait(keys, timeout)
    except dist.DistError as error:
        raise TransportTimeoutError(_who_is_missing(store, keys, timeout)) from error


def _who_is_missing(store: dist.Store, keys: list[str], timeout: timedelta) -> str:
    try:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except dist.DistError:
        return f"expected {len(keys)} ranks; the store at rank 0 ended before all had joined"
    return (
        f"expected {len(keys)} ranks, joined {len(keys) - len(missing)} within {timeout.total_seconds():g} s; missing: "
        f"{named(missing)}"
    )
