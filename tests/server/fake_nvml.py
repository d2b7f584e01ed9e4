"""A stand-in for the module `pynvml`: what each function answers or fails with is set by its attributes.

Names and shapes are those of nvidia-ml-py 13; `test_server_nvml.py` compares them with the real module.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0


class NVMLError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED = (3, "Not Supported")
NOT_FOUND = (6, "Not Found")
NOT_IN_LIBRARY = (13, "Function Not Found")
LOST = (15, "GPU is lost")


class FakeNvml:
    """Behaves like the module. `errors` maps a function's name, or the name and a handle, to (code, text)."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(
        self,
        *,
        count: int = 1,
        name: str | bytes = "RTX 4090",
        errors: dict[Any, tuple[int, str]] | None = None,
        compute: tuple[tuple[int, int | None], ...] = (),
        graphics: tuple[tuple[int, int | None], ...] = (),
        throttle: int = 0,
        instances: dict[int, str] | None = None,
    ) -> None:
        self.count = count
        self.name = name
        self.errors = errors or {}
        self.compute, self.graphics = compute, graphics
        self.throttle = throttle
        self.instances = instances
        """Place -> profile of the MIG instances of GPU 0; None while MIG is off."""
        self.samples: list[Any] = []
        self.calls: list[str] = []

    def _may_fail(self, function: str, handle: Any = None) -> None:
        self.calls.append(function)
        for key in (function, (function, handle)):
            if key in self.errors:
                raise NVMLError(*self.errors[key])

    def nvmlInit(self) -> None:
        self._may_fail("nvmlInit")

    def nvmlShutdown(self) -> None:
        self._may_fail("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._may_fail("nvmlSystemGetDriverVersion")
        return "550.54.14"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._may_fail("nvmlSystemGetCudaDriverVersion_v2")
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("nvmlDeviceGetCount")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._may_fail("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        self._may_fail("nvmlDeviceGetUUID", handle)
        return f"MIG-{handle}" if isinstance(handle, str) else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: Any) -> str | bytes:
        self._may_fail("nvmlDeviceGetName", handle)
        return f"{self.name!s} MIG {handle}" if isinstance(handle, str) else self.name

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        self._may_fail("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(busId=b"00000000:01:00.0")

    def nvmlDeviceGetNumGpuCores(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetNumGpuCores", handle)
        return 16384

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        self._may_fail("nvmlDeviceGetMemoryInfo", handle)
        if isinstance(handle, str):
            return SimpleNamespace(total=10 << 30, used=1 << 30)
        return SimpleNamespace(total=24 << 30, used=4 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        self._may_fail("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=94, memory=50)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        self._may_fail("nvmlDeviceGetTemperature", handle)
        return 72

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, threshold: int) -> int:
        self._may_fail("nvmlDeviceGetTemperatureThreshold", handle)
        return {1: 93}[threshold]

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetPowerUsage", handle)
        return 318_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 450_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetTotalEnergyConsumption", handle)
        return 7_200_000

    def nvmlDeviceGetFanSpeed(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetFanSpeed", handle)
        return 41

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int:
        self._may_fail("nvmlDeviceGetClockInfo", handle)
        return {1: 2520, 2: 10501}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, clock: int) -> int:
        self._may_fail("nvmlDeviceGetMaxClockInfo", handle)
        return {1: 3105}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return self.throttle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return self.throttle

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        self._may_fail("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        self._may_fail("nvmlDeviceGetGraphicsRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self.graphics]

    def nvmlDeviceGetProcessUtilization(self, handle: Any, since: int) -> list[Any]:
        """Like the driver: only samples that are newer, and an error when there are none."""
        self._may_fail("nvmlDeviceGetProcessUtilization", handle)
        newer = [sample for sample in self.samples if sample.timeStamp > since or sample.timeStamp == 0]
        if not newer:
            raise NVMLError(*NOT_FOUND)
        return newer

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        self._may_fail("nvmlDeviceGetMigMode", handle)
        if self.instances is None:
            raise NVMLError(*NOT_SUPPORTED)
        return [1, 1] if handle == 0 else [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        self._may_fail("nvmlDeviceGetMaxMigDeviceCount", handle)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> str:
        self._may_fail("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        if index not in (self.instances or {}):
            raise NVMLError(*NOT_FOUND)
        assert self.instances is not None
        return self.instances[index]
