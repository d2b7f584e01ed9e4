"""A stand-in for the module `pynvml`. Which functions fail, and how, is set by `setup` or in FAKE_NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0


class NVMLError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    """Behaves like the module. `errors` maps a function's name to (code, text)."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(
        self, *, count: int = 1, name: str | bytes = "RTX 4090", errors: dict[str, tuple[int, str]] | None = None
    ) -> None:
        self.count = count
        self.name = name
        self.errors = errors or {}
        self.calls: list[str] = []

    def _may_fail(self, function: str) -> None:
        self.calls.append(function)
        if function in self.errors:
            raise NVMLError(*self.errors[function])

    def nvmlInit(self) -> None:
        self._may_fail("nvmlInit")

    def nvmlShutdown(self) -> None:
        self._may_fail("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("nvmlDeviceGetCount")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._may_fail("nvmlDeviceGetHandleByIndex")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self._may_fail("nvmlDeviceGetUUID")
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        self._may_fail("nvmlDeviceGetName")
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._may_fail("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=24 << 30, used=4 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._may_fail("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=94, memory=50)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._may_fail("nvmlDeviceGetTemperature")
        return 72

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._may_fail("nvmlDeviceGetPowerUsage")
        return 318_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._may_fail("nvmlDeviceGetEnforcedPowerLimit")
        return 450_000
