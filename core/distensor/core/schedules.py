"""Pipeline schedules as data: for each rank of a pipeline, the order of its actions.

A schedule is a pure function of (ranks, stages, micro-batches). The worker runs the list; it never needs to know
which schedule it was. Sources are named where the orders are written: schedule_orders.py and zero_bubble.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum

from distensor.core.actions import Action, Phase
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.problems import nearest_name
from distensor.core.schedule_orders import gpipe, interleaved, looped_bfs, one_f_one_b, plain_warm_up
from distensor.core.zero_bubble import zero_bubble, zero_bubble_v

__all__ = [
    "KNOWN_LATER",
    "Action",
    "Phase",
    "Schedule",
    "actions_of_rank",
    "check_pipeline_sizes",
    "check_schedule",
    "check_warm_up",
    "parse_schedule",
    "rank_of_stage",
    "splits_backward",
    "stages_of_rank",
    "takes_warm_up",
]


class Schedule(StrEnum):
    """The names that `Trainer(schedule=)` takes."""

    GPIPE = "gpipe"
    LOOPED_BFS = "looped_bfs"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
    ZBV = "zbv"


KNOWN_LATER = ("dualpipev",)
"""Names of schedules that this version knows and does not have."""


def parse_schedule(name: str) -> Schedule:
    if name in KNOWN_LATER:
        raise UnsupportedOptionError(
            f"schedule={name!r} is not implemented in this version; use one of {', '.join(Schedule)}"
        )
    try:
        return Schedule(name)
    except ValueError:
        near = nearest_name(name, Schedule)
        raise ConfigError(f"schedule={name!r}: expected one of {', '.join(Schedule)}{near}") from None


def check_schedule(schedule: Schedule, *, ranks: int, stages: int) -> None:
    """Raise ConfigError unless this schedule can run so many stages on so many ranks."""
    check_pipeline_sizes(ranks=ranks, stages=stages)
    if schedule is Schedule.INTERLEAVED and stages == ranks > 1:
        raise ConfigError(
            f"schedule='interleaved' with {stages} stages and pipeline_parallel={ranks}: it takes at least two stages "
            f"a rank; cut the module into {2 * ranks} stages, or use schedule='1f1b'"
        )
    if schedule is Schedule.ZBV and stages != 2 * ranks:
        raise ConfigError(
            f"schedule='zbv' with {stages} stages and pipeline_parallel={ranks}: it takes two stages a rank; cut the "
            f"module into {2 * ranks} stages, or use schedule='zero_bubble'"
        )


_LOOK_FOR_SIZES = 64
"""How far from a wrong number of ranks a right one is looked for."""


def check_pipeline_sizes(*, ranks: int, stages: int) -> None:
    """Raise ConfigError unless each pipeline rank can hold the same number of stages."""
    if ranks < 1 or stages < ranks or stages % ranks != 0:
        raise ConfigError(
            f"{stages} stages cannot be laid over pipeline_parallel={ranks}: the number of stages must be "
            f"{ranks} or a multiple of it{_nearest_sizes(ranks, stages)}"
        )


def _nearest_sizes(ranks: int, stages: int) -> str:
    """What fits these stages, nearest to what was asked for."""
    if stages < 1 or ranks < 1:
        return ""
    near = range(max(1, min(ranks, stages) - _LOOK_FOR_SIZES), min(stages, ranks + _LOOK_FOR_SIZES) + 1)
    fitting = sorted((size for size in near if stages % size == 0), key=lambda size: (abs(size - ranks), size))[:2]
    return f"; pipeline_parallel={' or '.join(map(str, sorted(fitting)))} fits {stages} stages" if fitting else ""


def rank_of_stage(schedule: Schedule, stage: int, *, ranks: int) -> int:
    """The pipeline rank where a stage lives: `stage` mod `ranks`; with "zbv" there and back as a V."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule is Schedule.ZBV and turn % 2 else place


def stages_of_rank(schedule: Schedule, rank: int, *, ranks: int, stages: int) -> tuple[int, ...]:
    """The stages of one pipeline rank, in order."""
    return tuple(
        first + (rank_of_stage(schedule, first + rank, ranks=ranks) if schedule is Schedule.ZBV else rank)
        for first in range(0, stages, ranks)
    )


def takes_warm_up(schedule: Schedule, *, ranks: int, stages: int) -> bool:
    """Whether the depth of the warm-up is a free choice: 1F1B with one stage a rank."""
    return schedule is Schedule.ONE_F_ONE_B and stages == ranks


def check_warm_up(warm_up: Sequence[int], *, ranks: int) -> None:
    """Raise ConfigError unless 1F1B can run with these forwards ahead, one number for each rank.

    A rank must have sent what the next one wants to have ahead before it waits for a gradient.
    """
    falling = all(before >= after for before, after in itertools.pairwise(warm_up))
    if len(warm_up) != ranks or not falling or warm_up[-1] < 0:
        raise ConfigError(
            f"warm_up={str(list(warm_up))[:100]}: expected {ranks} numbers of at least 0, none larger than the one "
            f"before, for example {[plain_warm_up(rank, ranks) for rank in range(ranks)]}"
        )


def splits_backward(schedule: Schedule) -> bool:
    """Whether its lists hold I and W instead of B."""
    return schedule in (Schedule.ZERO_BUBBLE, Schedule.ZBV)


def actions_of_rank(
    schedule: Schedule, *, rank: int, ranks: int, stages: int, micro_batches: int, warm_up: Sequence[int] | None = None
) -> tuple[Action, ...]:
    """The actions of pipeline rank `rank`, in order.

    With more stages than ranks, 1F1B means interleaved 1F1B.

    Args:
        warm_up: for each rank the forwards that 1F1B with one stage a rank runs ahead; None: its distance to the end.

    Raises:
        ConfigError: sizes that this schedule cannot have.
    """
    check_schedule(schedule, ranks=ranks, stages=stages)
    if warm_up is not None:
        check_warm_up(warm_up, ranks=ranks)
    if micro_batches == 0:
        return ()
    match schedule:
        case Schedule.GPIPE:
            return gpipe(rank, ranks, stages, micro_batches)
        case Schedule.LOOPED_BFS:
            return looped_bfs(rank, ranks, stages, micro_batches)
        case Schedule.ZERO_BUBBLE:
            return zero_bubble(rank, ranks, stages, micro_batches)
        case Schedule.ZBV:
            return zero_bubble_v(rank, ranks, micro_batches)
    if stages == ranks:
        return one_f_one_b(rank, micro_batches, plain_warm_up(rank, ranks) if warm_up is None else warm_up[rank])
    return interleaved(rank, ranks, stages, micro_batches)
