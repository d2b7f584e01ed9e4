"""The keywords of `Trainer` that shape the run, checked together before anything happens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distensor.core import ParallelConfig
from distensor.core.compute import (
    ContextAttention,
    Precision,
    Recompute,
    parse_context_attention,
    parse_precision,
    parse_recompute,
)
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.problems import Problems, nearest_name
from distensor.core.schedules import Schedule, check_pipeline_sizes, check_schedule, parse_schedule
from distensor.nn import Shard
from distensor.optim import parse_lr_schedule
from distensor.optim.clipping import NormType, parse_norm_type
from distensor.sync import Sync
from distensor.training.checkpoint_options import CheckpointOptions, checkpoint_options
from distensor.training.spot_checks import DEFAULT_RATE, MOST_WITNESSES, check_rate

if TYPE_CHECKING:
    from distensor.nn import DistributedModel

IMPLEMENTED: Mapping[str, tuple[object, ...]] = {
    "sync": ("allreduce", "zero3", "distro", "demo", "diloco", "sparseloco"),
    "backend": ("tls",),
}
PLANNED: Mapping[str, tuple[object, ...]] = {
    "sync": (),
    "backend": ("gloo", "nccl"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerOptions:
    """What `Trainer` was told, once it is known to be possible."""

    parallel: ParallelConfig
    stages: int
    schedule: Schedule
    micro_batches: int
    clip_norm: float | None
    norm_type: NormType
    precision: Precision
    recompute: Recompute
    context_attention: ContextAttention
    context_shares: tuple[int, ...]
    accumulate: int
    seed: int
    sync: Sync = Sync.ALLREDUCE
    elastic: bool = True
    spot_checks: float = 0.0
    """The share of units that is recomputed."""
    wait: bool = False
    priority: int = 0
    checkpoint: CheckpointOptions | None

    @classmethod
    def of(
        cls,
        *,
        model: DistributedModel,
        parallel: ParallelConfig,
        schedule: str,
        micro_batches: int | None,
        clip_norm: float | None,
        norm_type: float | str,
        precision: str,
        recompute: str,
        context_attention: str,
        accumulate: int,
        lr_schedule: object,
        seed: int,
        checkpoint: object = None,
        checkpoint_every: object = None,
        checkpoint_keep: object = None,
        elastic: object = True,
        context_shares: Sequence[int] | None = None,
        spot_checks: float | None = None,
        wait: object = False,
        priority: object = 0,
        **choices: Any,
    ) -> TrainerOptions:
        """Everything is checked before anything is said: the message names each keyword that is wrong, its value and
        what would be right.

        Raises:
            ConfigError, UnsupportedOptionError: one problem.
            SeveralProblemsError: a ConfigError with all of them.
        """
        if not isinstance(parallel, ParallelConfig):
            raise ConfigError(f"parallel={parallel!r}: expected a ParallelConfig")
        problems = Problems()
        for keyword, value in choices.items():
            problems.check(_check_choice, keyword, value)
        problems.check(_check_tensor_parallel, parallel, model)
        problems.check(parse_lr_schedule, lr_schedule)
        problems.check(check_pipeline_sizes, ranks=parallel.pipeline_parallel, stages=model.stage_count)
        fields: dict[str, Any] = {
            "schedule": problems.check(_schedule, schedule, ranks=parallel.pipeline_parallel, stages=model.stage_count),
            "micro_batches": problems.check(_micro_batches, micro_batches, parallel),
            "clip_norm": problems.check(_clip_norm, clip_norm),
            "norm_type": problems.check(parse_norm_type, norm_type),
            "precision": problems.check(parse_precision, precision),
            "recompute": problems.check(parse_recompute, recompute),
            "context_attention": problems.check(parse_context_attention, context_attention),
            "context_shares": problems.check(_context_shares, context_shares, parallel),
            "accumulate": problems.check(_integer, "accumulate", accumulate, at_least=1),
            "seed": problems.check(_integer, "seed", seed, at_least=0),
            "elastic": problems.check(_flag, "elastic", elastic),
            "spot_checks": problems.check(_spot_checks, spot_checks, parallel, choices.get("sync")),
            "wait": problems.check(_flag, "wait", wait),
            "priority": problems.check(_integer, "priority", priority, at_least=0),
            "checkpoint": problems.check(checkpoint_options, checkpoint, checkpoint_every, checkpoint_keep),
        }
        problems.report()
        return cls(
            parallel=parallel, stages=model.stage_count, sync=Sync(choices.get("sync", Sync.ALLREDUCE)), **fields
        )


def _check_choice(keyword: str, value: object) -> None:
    allowed = IMPLEMENTED[keyword]
    if value in allowed and not isinstance(value, bool):
        return
    choices = " or ".join(repr(choice) for choice in allowed)
    planned = PLANNED.get(keyword)
    # Where any value makes sense (a folder, a number), every other one is an option that is still to come.
    if planned is None or value in planned:
        raise UnsupportedOptionError(f"{keyword}={value!r} is not implemented in this version; use {choices}")
    near = nearest_name(value, [name for name in (*allowed, *planned) if isinstance(name, str)])
    raise ConfigError(f"{keyword}={value!r}: expected {choices}{near}")


def _check_tensor_parallel(parallel: ParallelConfig, model: DistributedModel) -> None:
    """What is cut is declared, never guessed."""
    size = parallel.tensor_parallel
    if size == 1 or any(isinstance(placement, Shard) for placement in model.placements.values()):
        return
    what = "the model has no tp_spec" if model.tp_spec is None else "the model's tp_spec cuts nothing"
    raise ConfigError(
        f"tensor_parallel={size}, but {what}: name the weights to cut with Shard(dim=...) "
        "(ds.nn.suggest_sharding(module) prints a proposal), or use tensor_parallel=1"
    )


AUTO = "auto"
"""As `schedule`: the one that adapts to measured links; with several stages a rank, the one that fits them."""


def _schedule(name: str, *, ranks: int, stages: int) -> Schedule:
    if name == AUTO:
        return Schedule.ONE_F_ONE_B  # with several stages a rank it is the interleaved one
    schedule = parse_schedule(name)
    if stages % ranks == 0:  # otherwise the sizes are a problem of their own, whatever the schedule
        check_schedule(schedule, ranks=ranks, stages=stages)
    return schedule


def _micro_batches(value: int | None, parallel: ParallelConfig) -> int:
    if value is None:
        return 1 if parallel.pipeline_parallel == 1 else 2 * parallel.pipeline_parallel
    return _integer("micro_batches", value, at_least=1)


def _context_shares(value: Sequence[int] | None, parallel: ParallelConfig) -> tuple[int, ...]:
    if value is None:
        return ()
    ranks = parallel.context_parallel
    shares = tuple(value) if isinstance(value, list | tuple) else ()
    if len(shares) != ranks or not all(isinstance(item, int) and item > 0 for item in shares) or True in shares:
        raise ConfigError(
            f"context_shares={value!r}: expected a positive integer for each of the {ranks} ranks of context_parallel"
        )
    return shares


def _integer(keyword: str, value: object, *, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{keyword}={value!r}: expected an integer of at least {at_least}")
    return value


def _flag(keyword: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{keyword}={value!r}: expected True or False")
    return value


def _spot_checks(value: float | None, parallel: ParallelConfig, sync: object) -> float:
    """By default some, where another rank alone can recompute a unit and a third can say which of two is right."""
    alone = parallel.world_size == parallel.data_parallel and sync in (None, Sync.ALLREDUCE.value)
    if value is None:
        return DEFAULT_RATE if alone and parallel.data_parallel > MOST_WITNESSES else 0.0
    rate = check_rate(value)
    if rate and not (alone and parallel.data_parallel > 1):
        raise UnsupportedOptionError(
            f"spot_checks={value!r}: only where data_parallel is 2 or more, all other axes 1 and sync='allreduce' can "
            "another worker recompute a unit in this version; use spot_checks=0"
        )
    return rate


def _clip_norm(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"clip_norm={value!r}: expected a positive finite number, or None")
    return float(value)
