"""Faults on purpose, for tests and demonstrations: this process kills or stops itself at a given point of a step, or
does not get some of the updates that replicas exchange, or gives the others what it did not compute.

The script comes in an environment variable that the supervisor hands on; without it nothing happens. Each fault is of
one epoch, so that the process that takes the place of the one that died does not die of it too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from distensor.core.errors import ConfigError

VARIABLE = "DISTENSOR_FAULTS"


class FaultPhase(StrEnum):
    """Where in a step a fault comes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    """All backwards are over, and sums of gradients are under way."""
    DECIDE = "decide"
    """The sums are complete; the word of all ranks on the step is not."""
    UPDATE = "update"
    """The step is decided; neither is the update carried out, nor the trainer answered."""
    CHECKPOINT = "checkpoint"
    """A copy for a checkpoint is about to be made; `step` is the newest one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """`signal` is KILL or STOP."""

    rank: int
    step: int
    phase: FaultPhase
    epoch: int = 1
    signal: str = "KILL"


def fail_at(rank: int, step: int, phase: FaultPhase | str, *, epoch: int = 1, signal: str = "KILL") -> Fault:
    """A fault of `rank` in `phase` of `step`, or of the first step after it that `epoch` has.

    Raises:
        ConfigError: no such phase or signal.
    """
    try:
        found = FaultPhase(phase)
    except ValueError:
        raise ConfigError(f"phase={phase!r}: expected one of {', '.join(FaultPhase)}") from None
    if signal not in ("KILL", "STOP"):
        raise ConfigError(f"signal={signal!r}: expected KILL or STOP")
    return Fault(rank=rank, step=step, phase=found, epoch=epoch, signal=signal)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A `share` of the updates that replicas exchange does not arrive: drawn anew for each exchange, sender and
    receiver, alike in every run of the same `seed`."""

    share: float
    seed: int = 0

    def takes(self, turn: int, sender: int, receiver: int) -> bool:
        """Whether the update of `sender` in exchange number `turn` of an epoch is lost on its way to `receiver`."""
        drawn = hashlib.sha256(f"{self.seed} {turn} {sender} {receiver}".encode()).digest()
        return int.from_bytes(drawn[:8]) < self.share * 2**64


def lose(share: float, *, seed: int = 0) -> Loss:
    """Raises ConfigError for a share that is none."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not (math.isfinite(share) and 0 <= share <= 1):
        raise ConfigError(f"lose={share!r}: expected a share of the messages, from 0 to 1")
    return Loss(share=float(share), seed=seed)


SCALED, STALE = "scaled", "stale"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheat:
    """From `step` on, `rank` gives the other replicas its gradients times `factor` (scaled), or those of its first step
    once more (stale)."""

    rank: int
    step: int
    how: str
    factor: float = 1.0


def cheat(rank: int, how: str, *, step: int = 2, factor: float = 1.5) -> Cheat:
    """Raises ConfigError for a way that is none, or a factor that is no number."""
    if how not in (SCALED, STALE):
        raise ConfigError(f"how={how!r}: expected {SCALED} or {STALE}")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
        raise ConfigError(f"factor={factor!r}: expected a finite number")
    return Cheat(rank=rank, step=step, how=how, factor=float(factor))


def environment_of(*faults: Fault | Loss | Cheat) -> dict[str, str]:
    """The variable that carries these faults."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def _fault_of(fields: dict[str, Any]) -> Fault | Loss | Cheat:
    if "share" in fields:
        return lose(**fields)
    return cheat(**fields) if "how" in fields else fail_at(**fields)


class FaultScript:
    """What this process is to suffer."""

    def __init__(self, faults: tuple[Fault | Loss | Cheat, ...] = ()) -> None:
        self._faults = tuple(fault for fault in faults if isinstance(fault, Fault))
        self.loss = next((fault for fault in faults if isinstance(fault, Loss)), None)
        """What happens to updates that replicas exchange; None: they arrive."""
        self.cheat = next((fault for fault in faults if isinstance(fault, Cheat)), None)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> FaultScript:
        """Raises ConfigError for a variable that is no script."""
        text = environment.get(VARIABLE, "")
        try:
            return cls(tuple(_fault_of(fields) for fields in json.loads(text)) if text else ())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{VARIABLE}={text[:100]!r}: {error}") from error

    def reach(self, phase: FaultPhase, *, rank: int, epoch: int, step: int) -> None:
        """Here this process is; does not return where the script says so."""
        for fault in self._faults:
            if (fault.phase, fault.rank, fault.epoch) == (phase, rank, epoch) and step >= fault.step:
                os.kill(os.getpid(), getattr(signal, f"SIG{fault.signal}"))
