"""What is said of a step, and the answers of all ranks as one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distensor.core.progress import StepProgress
from distensor.training.replies import Reply, layout_bytes
from distensor.training.results import StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.core import Epoch
    from distensor.optim import OptimizerSpec
    from distensor.training.options import TrainerOptions
    from distensor.training.pieces import MeshPieces
    from distensor.training.replies import Layout, StepReply
    from distensor.training.spot_checks import Check


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try at a step: the micro-batches of each replica, and who the ranks were."""

    parts: Sequence[Sequence[Mapping[str, Tensor]]]
    epoch: Epoch
    replica_of: Mapping[int, int]
    total_steps: int | None
    check: Check | None = None


def load_words(options: TrainerOptions, pieces: MeshPieces, optimizer: OptimizerSpec) -> dict[str, Any]:
    """What the load command says besides programs and weights."""
    return {
        "schedule": options.schedule.value,
        "stages": options.stages,
        "optimizer": optimizer.to_json(),
        "clip_norm": options.clip_norm,
        "norm_type": options.norm_type.value,
        "seed": options.seed,
        "tied": pieces.tied,
        "sharded": pieces.sharded,
        "recompute": options.recompute.value,
        "sync": options.sync.value,
    }


def wanted_tensors(layouts: Mapping[int, Layout]) -> dict[int, dict[str, list[str]]]:
    """What each rank is asked to send, as words of a command."""
    return {rank: {"wanted": list(layout)} for rank, layout in layouts.items()}


def most_bytes(layouts: Mapping[int, Layout]) -> dict[int, int]:
    """The most bytes that each rank's answer may hold."""
    return {rank: layout_bytes(layout) for rank, layout in layouts.items()}


def slowest_of(replies: Sequence[Reply], answers: Sequence[StepReply]) -> str:
    """Rank and node that the others wait for, where there are others."""
    longest = max(range(len(answers)), key=lambda index: answers[index].compute_seconds)
    return replies[longest].who if len(replies) > 1 else ""


def step_result(
    number: int,
    lr: float,
    answers: Sequence[StepReply],
    seconds: float,
    sent: int,
    received: int,
    warm_up: tuple[int, ...],
    slowest: str,
) -> StepResult:
    """One result of the answers of all ranks, which agree on loss and norm."""
    return StepResult(
        step=number,
        loss=answers[0].loss,
        tokens=int(answers[0].weight),
        grad_norm=answers[0].grad_norm,
        lr=lr,
        bytes_sent=sent,
        bytes_received=received,
        seconds=seconds,
        compute_seconds=max(answer.compute_seconds for answer in answers),
        sync_seconds=max(answer.sync_seconds for answer in answers),
        wait_seconds=max(answer.wait_seconds for answer in answers),
        warm_up=warm_up,
        memory=tuple(answer.memory for answer in answers),
        slowest=slowest,
    )


def progress_of(result: StepResult) -> StepProgress:
    """The part of a step's result that the hub is told."""
    return StepProgress(
        step=result.step,
        loss=result.loss,
        tokens=result.tokens,
        seconds=result.seconds,
        bytes_sent=result.bytes_sent,
        bytes_received=result.bytes_received,
    )
