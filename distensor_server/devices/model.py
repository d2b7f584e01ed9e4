"""A device with its readings, and what of it the hub is told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distensor.core.control import DeviceInfo, DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable

NOT_READ = Unavailable(reason="not read yet")
FREE_GRAIN = 256 * 1024 * 1024
"""The hub is told free memory in steps of 256 MiB, so that a heartbeat carries news only when there is some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """`unusable` is the reason why it takes no work; `fault` says that the reason is worth a warning."""

    device_id: DeviceId
    kind: DeviceKind
    name: str
    slots: int
    unusable: str | None = None
    fault: bool = False
    utilization: Reading[float] = NOT_READ
    memory_used: Reading[int] = NOT_READ
    memory_total: Reading[int] = NOT_READ
    temperature_c: Reading[float] = NOT_READ
    power_w: Reading[float] = NOT_READ
    power_limit_w: Reading[float] = NOT_READ

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            device_id=self.device_id,
            kind=self.kind,
            name=self.name,
            slots=0 if self.unusable else self.slots,
            memory_bytes=self.memory_total,
            free_bytes=self._free(),
            unusable=self.unusable,
        )

    def _free(self) -> Reading[int]:
        if isinstance(self.memory_total, Unavailable):
            return self.memory_total
        if isinstance(self.memory_used, Unavailable):
            return self.memory_used
        free = max(0, self.memory_total - self.memory_used)
        return free // FREE_GRAIN * FREE_GRAIN if free > FREE_GRAIN else free


def without_readings(device: Device, reason: str) -> Device:
    """The same device when nothing can be read from it any more."""
    gone = Unavailable(reason=reason)
    return replace(device, utilization=gone, memory_used=gone, temperature_c=gone, power_w=gone)
