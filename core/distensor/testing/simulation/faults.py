"""What goes wrong in a run, and when: a list that the seed makes before the run begins, so that one can be left out
without changing the others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    HUB_KILL = "hub killed"
    HUB_POWER = "hub without power"
    HUB_KILL_IN_COMMIT = "hub killed inside a commit"
    HUB_STOP = "hub stopped"
    DISK_FULL = "hub's disk full"
    HUB_CLOCK = "hub's clock set"
    NODE_KILL = "node killed"
    NODE_POWER = "node without power"
    NODE_CLOCK = "node's clock set"
    WORKER_KILL = "worker killed"
    TRAINER_KILL = "trainer killed"
    TRAINER_POWER = "trainer without power"
    CUT_NODE = "node cut off"
    CUT_TRAINER = "trainer cut off"
    CUT_PEERS = "trainer and node cut off from each other"
    SLOW = "slow path"
    RESET = "streams reset"
    THEFT = "receipts for another's job"


_WEIGHTS: dict[FaultKind, int] = {
    FaultKind.HUB_KILL: 3,
    FaultKind.HUB_POWER: 1,
    FaultKind.HUB_KILL_IN_COMMIT: 3,
    FaultKind.HUB_STOP: 1,
    FaultKind.DISK_FULL: 1,
    FaultKind.HUB_CLOCK: 3,
    FaultKind.NODE_KILL: 2,
    FaultKind.NODE_POWER: 2,
    FaultKind.NODE_CLOCK: 1,
    FaultKind.WORKER_KILL: 5,
    FaultKind.TRAINER_KILL: 1,
    FaultKind.TRAINER_POWER: 1,
    FaultKind.CUT_NODE: 4,
    FaultKind.CUT_TRAINER: 3,
    FaultKind.CUT_PEERS: 3,
    FaultKind.SLOW: 3,
    FaultKind.RESET: 3,
    FaultKind.THEFT: 1,
}

LONGEST_JUMP = 7 * 86400.0
_USUAL = (0.3, 12.0)
_LONG = (12.0, 60.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """At `at` seconds, for `seconds`. `draw` in [0, 1) chooses whom it meets; `size` is how far a clock jumps or how
    slow a path gets, in seconds."""

    number: int
    at: float
    kind: FaultKind
    seconds: float
    draw: float
    size: float

    def __str__(self) -> str:
        return f"#{self.number} at {self.at:.1f} s: {self.kind.value} ({self.seconds:.1f} s)"


def plan(dice: random.Random, *, first: float, last: float, every: float) -> tuple[Fault, ...]:
    """Faults from `first` to `last` seconds, one in `every` seconds on average."""
    faults: list[Fault] = []
    at = first
    while (at := at + dice.expovariate(1 / every)) < last:
        kind = dice.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        seconds = dice.uniform(*(_LONG if dice.random() < 0.15 else _USUAL))
        size = dice.uniform(0.1, 3.0) if kind is FaultKind.SLOW else dice.uniform(-LONGEST_JUMP, LONGEST_JUMP)
        faults.append(Fault(number=len(faults), at=at, kind=kind, seconds=seconds, draw=dice.random(), size=size))
    return tuple(faults)
