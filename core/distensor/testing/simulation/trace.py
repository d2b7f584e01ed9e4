"""What happened in a run, in order, and a hash of all of it: the same seed gives the same hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Promise(StrEnum):
    """What has to hold; each violation is of one of these."""

    LEDGER = "the ledger sums to zero, and a unit is credited once, for what both sides said"
    SURVIVES = "what was acknowledged survives"
    OWNER = "one owner for each job, rank and epoch; nobody else speaks for it"
    EPOCH = "epochs never fall, and words of a lower epoch change nothing"
    GENERATION = "the generation grows with each start of the hub"
    LEASE = "who is heard is there, who is silent is not, whatever wall clocks say"
    GHOST = "a machine is one node"
    SLOTS = "a slot has one rank"
    LIVE = "without faults everything settles, and nothing is outstanding"
    DEFECT = "nothing raises what nobody expects"


class ViolationError(Exception):
    """A promise was broken."""

    def __init__(self, promise: Promise, text: str, *, step: int, seconds: float) -> None:
        super().__init__(f"{promise.name} at step {step}, {seconds:.3f} s: {text} ({promise.value})")
        self.promise = promise
        self.text = text
        self.step = step
        self.seconds = seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One event of a trace."""

    step: int
    seconds: float
    who: str
    text: str

    def __str__(self) -> str:
        return f"{self.step:6} {self.seconds:10.3f} {self.who:10} {self.text}"


class Trace:
    """`keep`: whether the entries stay to be looked at; the hash needs none of them."""

    def __init__(self, time: Callable[[], float], *, keep: bool = False) -> None:
        self._time = time
        self._hash = hashlib.sha256()
        self._keep = keep
        self.entries: list[Entry] = []
        self.steps = 0

    def note(self, who: str, text: str) -> None:
        """One event has happened."""
        self.steps += 1
        entry = Entry(step=self.steps, seconds=self._time(), who=who, text=text)
        self._hash.update(f"{entry.seconds:.6f} {who} {text}\n".encode())
        if self._keep:
            self.entries.append(entry)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
