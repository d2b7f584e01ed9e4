"""NVIDIA devices through NVML, as plain JSON values. Runs in the probe child only: a wedged driver can hang it.

A field that the driver does not have is `{"unavailable": reason}`; one missing field never costs the device. A lost
GPU costs its own entry and no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

HINTS = {
    12: "no NVIDIA driver is installed; install one if this machine has an NVIDIA GPU",
    9: "the NVIDIA kernel module is not loaded: `sudo modprobe nvidia`, or reboot after a driver update",
    18: "the driver was updated and the old kernel module is still loaded: reboot",
    4: "this user may not use the GPU: check the permissions of /dev/nvidia*",
    15: "the GPU has fallen off the bus: check power and cooling, then reboot",
    16: "the GPU must be reset: `sudo nvidia-smi --gpu-reset`, or reboot",
    999: "the driver does not answer properly, often after suspend: "
    "`sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm`, or reboot",
}
LIBRARY_NOT_FOUND = 12
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13
LOST = (15, 16)
"""Errors of the whole GPU, whichever reading they come with."""
VENDOR = "0x10de"
PCI = Path("/sys/bus/pci/devices")
PROC = Path("/proc")
REOPEN_AFTER = 150
"""NVML lists the GPUs of the moment at which it was opened: so many samples later it is opened anew (5 minutes)."""


def has_hardware(pci: Path = PCI) -> bool | None:
    """Whether the PCI bus has a device of NVIDIA; None where it cannot be read (macOS, WSL, some containers)."""
    try:
        vendors = [(device / "vendor").read_text().strip() for device in pci.iterdir()]
    except OSError:
        return None
    return VENDOR in vendors if vendors else None


def probe_nvml(nvml: Any, proc: Path = PROC) -> Json:
    """All devices of `nvml` (the module `pynvml`) once, or the error with its code and a hint."""
    session = Session(nvml, proc)
    try:
        return session.sample()
    finally:
        session.close()


def describe_error(error: Any) -> Json:
    code = int(getattr(error, "value", 0))
    return {"code": code, "message": str(error), "hint": HINTS.get(code, "")}


class Session:
    """NVML kept open between samples: opening it wakes a sleeping GPU and takes up to a second."""

    def __init__(self, nvml: Any, proc: Path = PROC) -> None:
        self._nvml = nvml
        self._proc = proc
        self._samples = 0
        self._open = False
        self._last_seen: dict[int, int] = {}
        """By index: the newest sample of process utilization that was read, in the driver's microseconds."""

    def sample(self) -> Json:
        nvml = self._nvml
        if self._samples >= REOPEN_AFTER:
            self.close()
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            self._samples += 1
            answer: Json = {"devices": [self._device(index) for index in range(nvml.nvmlDeviceGetCount())]}
        except nvml.NVMLError as error:
            answer = {"error": describe_error(error)}
        if "error" in answer or any("error" in device for device in answer["devices"]):
            self.close()  # what has come back is only found by opening again
        return answer

    def close(self) -> None:
        if self._open:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._open = False
        self._samples = 0

    def _device(self, index: int) -> Json:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            return {"index": index, **self._whole(handle, index)}
        except nvml.NVMLError as error:
            return {"index": index, "error": describe_error(error)}

    def _read(self, function: Callable[[], Any]) -> Any:
        """The reading or why there is none.

        Raises:
            NVMLError: the GPU is lost; no other reading of it means anything then.
        """
        try:
            return function()
        except self._nvml.NVMLError as error:
            if getattr(error, "value", 0) in LOST:
                raise
            return {"unavailable": f"NVML: {error}".lower().replace("nvml", "NVML")}

    def _whole(self, handle: Any, index: int) -> Json:
        nvml, read = self._nvml, self._read
        return {
            **self._identity(handle),
            "driver": read(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
            "cuda": read(lambda: int(nvml.nvmlSystemGetCudaDriverVersion_v2())),
            "bus": read(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            "cores": read(lambda: int(nvml.nvmlDeviceGetNumGpuCores(handle))),
            **self._sensors(handle),
            "processes": self._processes(handle, index),
            "mig": self._mig(handle),
        }

    def _identity(self, handle: Any) -> Json:
        nvml, read = self._nvml, self._read
        return {
            "uuid": read(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            "name": read(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            **_memory(read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))),
        }

    def _sensors(self, handle: Any) -> Json:
        nvml, read = self._nvml, self._read
        slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return {
            "utilization": read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            "temperature_c": read(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            "temperature_limit_c": read(lambda: float(nvml.nvmlDeviceGetTemperatureThreshold(handle, slowdown))),
            "power_w": read(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "power_limit_w": read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            "energy_j": read(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
            "fan": read(lambda: nvml.nvmlDeviceGetFanSpeed(handle) / 100),
            "clock_mhz": read(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "clock_limit_mhz": read(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
            "memory_clock_mhz": read(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            "throttle": read(lambda: self._throttle_bits(handle)),
        }

    def _throttle_bits(self, handle: Any) -> int:
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except nvml.NVMLError as error:
            if getattr(error, "value", 0) != FUNCTION_NOT_FOUND:
                raise
            return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # the name in drivers before 535

    def _processes(self, handle: Any, index: int | None) -> Any:
        """Compute and graphics contexts, one entry for each process."""
        nvml, read = self._nvml, self._read
        compute = read(lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
        graphics = read(lambda: list(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)))
        if isinstance(compute, dict):
            return compute
        busy = None if index is None else self._busy(handle, index)
        found: dict[int, Json] = {}
        for kind, contexts in (("compute", compute), ("graphics", graphics)):
            for context in contexts if isinstance(contexts, list) else ():
                self._add(found, int(context.pid), kind, getattr(context, "usedGpuMemory", None))
        for pid, entry in found.items():
            entry["utilization"] = {"unavailable": "not told for each process"} if busy is None else busy.get(pid, 0.0)
        return list(found.values())

    def _add(self, found: dict[int, Json], pid: int, kind: str, memory: int | None) -> None:
        entry = found.setdefault(pid, {"pid": pid, "name": process_name(pid, self._proc), "type": kind})
        if kind not in entry["type"]:
            entry["type"] += f"+{kind}"
        if memory is not None:
            entry["memory"] = max(int(memory), entry.get("memory", 0))

    def _busy(self, handle: Any, index: int) -> dict[int, float] | None:
        """Each process's share of the SMs since the last sample; None on the first, which has none before it."""
        nvml = self._nvml
        since = self._last_seen.get(index)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since or 0)
        except nvml.NVMLError as error:
            if getattr(error, "value", 0) in LOST:
                raise
            # 'Not found' says that no process has used the GPU since then.
            return {} if getattr(error, "value", 0) == NOT_FOUND else None
        newest = max((int(sample.timeStamp) for sample in samples), default=0)
        self._last_seen[index] = max(newest, since or 0)
        if since is None:
            return None
        # Drivers fill unused places with nonsense: times of zero and shares over 100 %.
        return {int(s.pid): s.smUtil / 100 for s in samples if s.timeStamp > since and s.smUtil <= 100}

    def _mig(self, handle: Any) -> Any:
        """The instances of a GPU that is cut into some; None while it is whole."""
        nvml = self._nvml
        mode = self._read(lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        if mode != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        instances = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError as error:
                if getattr(error, "value", 0) in LOST:
                    raise
                continue  # places without an instance answer 'not found'
            instances.append({**self._identity(instance), "processes": self._processes(instance, None)})
        return instances


def process_name(pid: int, proc: Path = PROC) -> Any:
    """The short name of a process that can be seen from here."""
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return {"unavailable": "this process id cannot be seen from here (another container?)"}


def _memory(info: Any) -> Json:
    if isinstance(info, dict):
        return {"memory_total": info, "memory_used": info}
    if not info.total:
        nothing = {"unavailable": "NVML: reports 0 bytes"}
        return {"memory_total": nothing, "memory_used": nothing}
    return {"memory_total": int(info.total), "memory_used": int(info.used)}


def _text(value: Any) -> str:
    """Older bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
