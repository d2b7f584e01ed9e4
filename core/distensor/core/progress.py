"""What a trainer tells its hub of a run while it goes on, for people who look at it. Nothing is decided by it."""

from __future__ import annotations

from dataclasses import dataclass

MOST_STEPS = 200
"""In one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProgress:
    """One committed step. `tokens` are the real elements that the loss is a mean over; bytes are those that left and
    reached the trainer; `seconds` are the slowest rank's."""

    step: int
    loss: float
    tokens: int
    seconds: float
    bytes_sent: int
    bytes_received: int
