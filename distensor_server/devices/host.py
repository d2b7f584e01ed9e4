"""The machine itself: CPU and memory as this process may use them. Cheap enough to read every other second."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable, value_or
from distensor_server.devices.cgroup import CgroupLimits, read_limits
from distensor_server.devices.model import Device, unread, with_readings
from distensor_server.devices.processor import SYS, CpuSensors, cpu_uuid

CPU_ID = DeviceId("cpu")
KERNEL_COUNTERS = Path("/proc/vmstat")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The memory of the machine or of the container, whichever is smaller."""

    total: int
    free: int


def usable_memory(total: int, available: int, limits: CgroupLimits) -> HostMemory:
    """A container's limit counts, not what the host has; and no more is free than either of them says."""
    limit = min(total, value_or(limits.memory_limit, total))
    return HostMemory(total=limit, free=min(available, value_or(limits.memory_free, available), limit))


def usable_cpus(allowed: int, limits: CgroupLimits) -> float:
    return min(float(allowed), value_or(limits.cpus, float(allowed)))


def threads_per_worker(cpus: float, slots: int) -> int:
    return max(1, int(cpus) // max(1, slots))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    memory: HostMemory
    cpus: float
    utilization: Reading[float]
    sensors: Mapping[str, Reading[Any]] = field(default_factory=dict)
    """More readings of the CPU, by their names in `Device`."""


class Host:
    """Reads the machine. Files and psutil's functions are arguments, for tests of containers."""

    def __init__(
        self,
        *,
        limits: Callable[[], CgroupLimits] = read_limits,
        kernel_counters: Path = KERNEL_COUNTERS,
        sensors: Callable[[], Mapping[str, Reading[Any]]] | None = None,
    ) -> None:
        self._limits = limits
        self._sensors = CpuSensors(SYS, SYSTEM_CLOCK.monotonic).read if sensors is None else sensors
        self._kernel_counters = kernel_counters
        psutil.cpu_percent(interval=None)  # the first reading of psutil is always 0.0: it has no past

    def sample(self) -> HostSample:
        limits = self._limits()
        memory = psutil.virtual_memory()
        return HostSample(
            memory=usable_memory(memory.total, memory.available, limits),
            cpus=usable_cpus(_allowed_cpus(), limits),
            utilization=round(min(100.0, psutil.cpu_percent(interval=None)) / 100, 3),
            sensors=self._sensors(),
        )

    def oom_kills(self) -> int:
        """How often the kernel has killed for memory: in this cgroup, or else on the whole machine."""
        counted = self._limits().oom_kills
        return _vmstat(self._kernel_counters) if isinstance(counted, Unavailable) else counted


def cpu_device(sample: HostSample, *, slots: int, name: str) -> Device:
    device = Device(
        device_id=CPU_ID,
        kind=DeviceKind.CPU,
        name=name,
        slots=slots,
        unusable=None if slots else "the owner offers no CPU workers (--cpu-workers 0)",
        uuid=cpu_uuid(),
        driver=f"{platform.system()} {platform.release()}",
        runtime=_threads(sample.cpus),
        cores=psutil.cpu_count(logical=False) or Unavailable(reason="the system does not tell"),
        bus=Unavailable(reason="the CPU is on none"),
        unified_memory=True,
        processes=Unavailable(reason="every process uses the CPU; its load is the reading"),
    )
    return unread(with_sample(device, sample), "no sensor of it is read on this system")


def with_sample(device: Device, sample: HostSample) -> Device:
    memory = sample.memory
    return replace(
        with_readings(device, sample.sensors),
        utilization=sample.utilization,
        memory_total=memory.total,
        memory_used=memory.total - memory.free,
    )


def _threads(usable: float) -> str:
    """What of the CPU this process may use: an affinity and the quota of a container count."""
    everything = os.cpu_count() or 1
    return f"all {everything} threads" if usable >= everything else f"{usable:g} of {everything} threads"


def cpu_name() -> str:
    """The model name: /proc/cpuinfo on Linux, what the platform says elsewhere."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _allowed_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _vmstat(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
