"""Pipeline schedules as data: for each rank of a pipeline, the order of its forward and backward actions.

A schedule is a pure function of (ranks, stages, micro-batches). The worker runs the list; it never needs to know
which schedule it was. Stage s lives on rank s mod P (looped placement).

Sources: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B (Narayanan et al. 2019, PipeDream-flush in
arXiv:2006.09503); interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.problems import nearest_name


class Schedule(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


KNOWN_LATER = ("interleaved", "zero_bubble", "zbv", "dualpipev")
"""Names of schedules that this version knows and does not have."""


class Phase(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One micro-batch through one stage, in one direction."""

    phase: Phase
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch}"


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


def actions_of_rank(
    schedule: Schedule, *, rank: int, ranks: int, stages: int, micro_batches: int
) -> tuple[Action, ...]:
    """The actions of pipeline rank `rank`, in order.

    With more stages than ranks, 1F1B means interleaved 1F1B where the number of micro-batches is a multiple of
    `ranks` (its definition needs that), and breadth-first GPipe order otherwise.

    Raises:
        ConfigError: `stages` is not a multiple of `ranks`, or a size is below 1.
    """
    check_pipeline_sizes(ranks=ranks, stages=stages)
    if micro_batches == 0:
        return ()
    if schedule is Schedule.GPIPE or (stages > ranks and micro_batches % ranks != 0):
        return _gpipe(rank, ranks, stages, micro_batches)
    if stages == ranks:
        return _one_f_one_b(rank, ranks, micro_batches)
    return _interleaved(rank, ranks, stages, micro_batches)


def check_pipeline_sizes(*, ranks: int, stages: int) -> None:
    """Raise ConfigError unless each pipeline rank can hold the same number of stages."""
    if ranks < 1 or stages < ranks or stages % ranks != 0:
        raise ConfigError(
            f"{stages} stages cannot be laid over pipeline_parallel={ranks}: the number of stages must be "
            f"{ranks} or a multiple of it"
        )


def _gpipe(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    own = range(rank, stages, ranks)
    forward = [
        Action(phase=Phase.FORWARD, stage=stage, micro_batch=micro) for stage in own for micro in range(micro_batches)
    ]
    backward = [
        Action(phase=Phase.BACKWARD, stage=stage, micro_batch=micro)
        for stage in reversed(own)
        for micro in range(micro_batches)
    ]
    return (*forward, *backward)


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    warm_up = min(ranks - 1 - rank, micro_batches)
    forward = [Action(phase=Phase.FORWARD, stage=rank, micro_batch=micro) for micro in range(micro_batches)]
    backward = [Action(phase=Phase.BACKWARD, stage=rank, micro_batch=micro) for micro in range(micro_batches)]
    return _merge(forward, backward, warm_up)


def _interleaved(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    chunks = stages // ranks
    total = chunks * micro_batches
    warm_up = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), total)

    def chunk_and_micro(index: int) -> tuple[int, int]:
        round_, within = divmod(index, ranks * chunks)
        chunk, micro = divmod(within, ranks)
        return chunk, round_ * ranks + micro

    forward, backward = [], []
    for index in range(total):
        chunk, micro = chunk_and_micro(index)
        forward.append(Action(phase=Phase.FORWARD, stage=chunk * ranks + rank, micro_batch=micro))
        last = (chunks - 1 - chunk) * ranks + rank
        backward.append(Action(phase=Phase.BACKWARD, stage=last, micro_batch=micro))
    return _merge(forward, backward, warm_up)


def _merge(forward: list[Action], backward: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    steady = [action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair]
    return (*forward[:warm_up], *steady, *backward[len(forward) - warm_up :])
