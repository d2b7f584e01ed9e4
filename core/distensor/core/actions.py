"""What a rank of a pipeline does, one line after the other: the words that schedules are written in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """One direction of one micro-batch. BACKWARD is both of the last two at once."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


RELEASING = frozenset({Phase.BACKWARD, Phase.WEIGHT_GRADIENT})
"""After these nothing of the micro-batch is held any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One micro-batch through one stage, in one direction."""

    phase: Phase
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.micro_batch}"


def forward(stage: int, micro_batch: int) -> Action:
    return Action(phase=Phase.FORWARD, stage=stage, micro_batch=micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    return Action(phase=Phase.BACKWARD, stage=stage, micro_batch=micro_batch)


def input_gradient(stage: int, micro_batch: int) -> Action:
    return Action(phase=Phase.INPUT_GRADIENT, stage=stage, micro_batch=micro_batch)


def weight_gradient(stage: int, micro_batch: int) -> Action:
    return Action(phase=Phase.WEIGHT_GRADIENT, stage=stage, micro_batch=micro_batch)


def peak_in_flight(actions: Iterable[Action]) -> int:
    """The most forwards of which a rank holds the activations at once; a split backward holds them until its W."""
    held = peak = 0
    for action in actions:
        held += (action.phase is Phase.FORWARD) - (action.phase in RELEASING)
        peak = max(peak, held)
    return peak
