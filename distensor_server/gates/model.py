"""Readings in, verdicts out: the values that the evaluation of the gates works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from enum import StrEnum

from distensor.core.reading import Reading, Unavailable
from distensor_server.picture import Gate
from distensor_server.surroundings.power import PowerSource

NOT_WATCHED = Unavailable(reason="not watched (no limit)")
BEING_READ = Unavailable(reason="being read")
"""Not read yet: a gate with a limit stays closed until there is a first answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReadings:
    """One device. Bytes, degrees Celsius, watts. `busy`: workers of ours run on it."""

    device_id: str
    accelerator: bool
    busy: bool = False
    temperature_c: Reading[float] = NOT_WATCHED
    power_w: Reading[float] = NOT_WATCHED
    memory_free: Reading[int] = NOT_WATCHED
    memory_own: int = 0
    foreign_bytes: Reading[int] = NOT_WATCHED


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """The machine at one moment. `idle_seconds` is infinite where nobody can be at it."""

    idle_seconds: Reading[float] = NOT_WATCHED
    power: Reading[PowerSource] = NOT_WATCHED
    metered: Reading[bool] = NOT_WATCHED
    ram_free: Reading[int] = NOT_WATCHED
    ram_own: int = 0
    disk_free: Reading[int] = NOT_WATCHED
    day_bytes: int = 0
    month_bytes: int = 0
    sent_rate: float = 0.0
    received_rate: float = 0.0
    devices: tuple[DeviceReadings, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """`wall` is Unix time, which may jump; `monotonic` is for durations."""

    wall: float
    monotonic: float
    zone: tzinfo


class Want(StrEnum):
    """What a reading asks of its gate.

    HOLD: between the thresholds, so nothing changes. READING: closed until the first answer, whatever that is.
    """

    OPEN = "open"
    HOLD = "hold"
    CLOSED = "closed"
    UNKNOWN = "unknown"
    READING = "reading"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one rule found. `mark` is kept when the gate closes; `dwells`: it opens only after the dwell."""

    want: Want
    reading: str
    limit: str = ""
    next_change_at: float | None = None
    mark: float = 0.0
    dwells: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Latch:
    """One gate between two evaluations. `since` is Unix time; the others are monotonic."""

    open: bool = True
    since: float | None = None
    changed: float = float("-inf")
    clear_since: float | None = None
    mark: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """How much of its time a device works, and the monotonic time of the last change."""

    factor: float = 1.0
    changed: float = float("-inf")


GateRef = tuple[str, str | None]
"""The name of a gate, and its device; None: of the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the evaluation remembers from one time to the next."""

    latches: Mapping[GateRef, Latch] = field(default_factory=dict)
    duties: Mapping[str, Duty] = field(default_factory=dict)

    def moved(self, by: float) -> Memory:
        """Wall time was set by so many seconds."""
        return replace(
            self,
            latches={
                ref: latch if latch.since is None else replace(latch, since=latch.since + by)
                for ref, latch in self.latches.items()
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """`gates` in the order in which they are asked; `duties` by device."""

    gates: tuple[Gate, ...]
    duties: Mapping[str, float]

    def closed(self, device: str | None) -> Gate | None:
        """The first closed gate of the node or of one device."""
        return next((gate for gate in self.gates if not gate.open and gate.device == device), None)

    @property
    def blocked(self) -> Gate | None:
        """The gate that keeps all work away: one of the node, or the first of the devices when each has one."""
        if (gate := self.closed(None)) is not None:
            return gate
        first = [self.closed(device) for device in self.duties]
        return first[0] if first and None not in first else None
