"""A device with its readings, and what of it the hub is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from distensor.core.control import NOT_BENCHMARKED, DeviceInfo, DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable, value_or
from distensor_server.devices.measured import Benchmark

NOT_READ = Unavailable(reason="not read yet")
FREE_GRAIN = 256 * 1024 * 1024
"""The hub is told free memory in steps of 256 MiB, so that a heartbeat carries news only when there is some."""


class Owner(StrEnum):
    """Whose process it is: ours, somebody else's, or not to be told from here (a process of another pid namespace)."""

    OWN = "own"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProcess:
    """A process that holds the device open. `utilization` is its share of the device's time, 0 to 1."""

    pid: int
    name: Reading[str]
    type: str
    """'compute', 'graphics' or both, joined by '+'."""
    memory: Reading[int]
    utilization: Reading[float] = NOT_READ

    def owner(self, own_pids: Set[int]) -> Owner:
        """A name that cannot be read means that the id is one of another namespace: it may be ours or not."""
        if isinstance(self.name, Unavailable):
            return Owner.UNKNOWN
        return Owner.OWN if self.pid in own_pids else Owner.FOREIGN


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """`unusable` is the reason why it takes no work; `fault` says that the reason is worth a warning.

    `blocked` is the part of the reason that lies in the software on this machine: it holds however well the device is.
    `uuid` is the same after a reboot and in another slot. Shares are 0 to 1, clocks MHz, `energy_j` counts up.
    """

    device_id: DeviceId
    kind: DeviceKind
    name: str
    slots: int
    unusable: str | None = None
    fault: bool = False
    blocked: str | None = None
    uuid: Reading[str] = NOT_READ
    driver: Reading[str] = NOT_READ
    runtime: Reading[str] = NOT_READ
    bus: Reading[str] = NOT_READ
    parent: DeviceId | None = None
    """The whole GPU of which this is a MIG instance."""
    profile: str | None = None
    """How a MIG instance is cut, as '1g.10gb'."""
    cores: Reading[int] = NOT_READ
    unified_memory: bool = False
    """It has no memory of its own: the figures are those of the machine."""
    utilization: Reading[float] = NOT_READ
    memory_used: Reading[int] = NOT_READ
    memory_total: Reading[int] = NOT_READ
    temperature_c: Reading[float] = NOT_READ
    temperature_limit_c: Reading[float] = NOT_READ
    """Where the hardware slows itself down."""
    power_w: Reading[float] = NOT_READ
    power_limit_w: Reading[float] = NOT_READ
    energy_j: Reading[float] = NOT_READ
    fan: Reading[float] = NOT_READ
    clock_mhz: Reading[float] = NOT_READ
    clock_limit_mhz: Reading[float] = NOT_READ
    memory_clock_mhz: Reading[float] = NOT_READ
    throttle: Reading[tuple[str, ...]] = NOT_READ
    """Why it runs below its clock right now; empty when nothing holds it back."""
    processes: Reading[tuple[DeviceProcess, ...]] = NOT_READ
    benchmark: Benchmark | None = None

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            device_id=self.device_id,
            kind=self.kind,
            name=self.name,
            slots=0 if self.unusable else self.slots,
            memory_bytes=self.memory_total,
            free_bytes=self._free(),
            unusable=self.unusable,
            uuid=value_or(self.uuid, ""),
            matmul_flops=self._rate("matmul_f32_p10"),
            memory_bytes_per_second=self._rate("memory_p10"),
        )

    def _rate(self, name: str) -> Reading[float]:
        return NOT_BENCHMARKED if self.benchmark is None else self.benchmark.rates.get(name, NOT_BENCHMARKED)

    def _free(self) -> Reading[int]:
        if isinstance(self.memory_total, Unavailable):
            return self.memory_total
        if isinstance(self.memory_used, Unavailable):
            return self.memory_used
        free = max(0, self.memory_total - self.memory_used)
        return free // FREE_GRAIN * FREE_GRAIN if free > FREE_GRAIN else free


NUMBERS = (
    "utilization",
    "memory_used",
    "memory_total",
    "temperature_c",
    "temperature_limit_c",
    "power_w",
    "power_limit_w",
    "energy_j",
    "fan",
    "clock_mhz",
    "clock_limit_mhz",
    "memory_clock_mhz",
)
"""The readings that are one number."""
FACTS = ("uuid", "driver", "runtime", "bus", "cores")
"""What does not change while the machine runs."""
LISTS = ("throttle", "processes")
MOMENTARY = tuple(name for name in (*NUMBERS, *LISTS) if name not in ("memory_total", "power_limit_w"))


def unread(device: Device, reason: str, names: tuple[str, ...] = (*NUMBERS, *FACTS, *LISTS)) -> Device:
    """The same device with this reason in each of the readings `names` that is still 'not read yet'."""
    gone = Unavailable(reason=reason)
    return with_readings(device, {name: gone for name in names if getattr(device, name) == NOT_READ})


def with_readings(device: Device, found: Mapping[str, Reading[Any]]) -> Device:
    """The same device with these readings by name."""
    changes: dict[str, Any] = dict(found)
    return replace(device, **changes)


def lost(device: Device, reason: str) -> Device:
    """The same device when it has gone: a fault, and no reading of the past is shown as one of now."""
    gone = Unavailable(reason=reason)
    return replace(with_readings(device, dict.fromkeys(MOMENTARY, gone)), unusable=reason, fault=True)


def cannot_choose(device: Device, family: Sequence[Device]) -> str | None:
    """A worker gets its GPU by UUID, whatever the order of this boot; without one it could get any of the family."""
    if not isinstance(device.uuid, Unavailable) or len(family) == 1:
        return None
    return f"it cannot be told from the other GPUs: {device.uuid.reason}"


def foreign_processes(device: Device, own_pids: Set[int]) -> Reading[tuple[DeviceProcess, ...]]:
    """The processes on the device that are certainly not ours, or why they cannot be told."""
    if isinstance(device.processes, Unavailable):
        return device.processes
    return tuple(process for process in device.processes if process.owner(own_pids) is Owner.FOREIGN)


def readings(device: Device) -> dict[str, Reading[object]]:
    """All readings by name."""
    return {name: getattr(device, name) for name in (*NUMBERS, *FACTS, *LISTS)}
