"""NVIDIA devices through NVML, as plain JSON values. Runs in the probe child only: a wedged driver can hang it.

A field that the driver does not have is `{"unavailable": reason}`; one missing field never costs the device.
"""

from __future__ import annotations

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
    999: "the driver does not answer properly, often after suspend: "
    "`sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm`, or reboot",
}
LIBRARY_NOT_FOUND = 12
VENDOR = "0x10de"
PCI = Path("/sys/bus/pci/devices")


def has_hardware(pci: Path = PCI) -> bool | None:
    """Whether the PCI bus has a device of NVIDIA; None where it cannot be read (macOS, WSL, some containers)."""
    try:
        vendors = [(device / "vendor").read_text().strip() for device in pci.iterdir()]
    except OSError:
        return None
    return VENDOR in vendors if vendors else None


def probe_nvml(nvml: Any) -> Json:
    """All devices of `nvml` (the module `pynvml`), or the error with its code and a hint."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"error": describe_error(error)}
    try:
        count = nvml.nvmlDeviceGetCount()
        return {"devices": [_device(nvml, index) for index in range(count)]}
    except nvml.NVMLError as error:
        return {"error": describe_error(error)}
    finally:
        nvml.nvmlShutdown()


def describe_error(error: Any) -> Json:
    code = int(getattr(error, "value", 0))
    return {"code": code, "message": str(error), "hint": HINTS.get(code, "")}


def _device(nvml: Any, index: int) -> Json:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"index": index, "error": describe_error(error)}

    def read(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except nvml.NVMLError as error:
            return {"unavailable": f"NVML: {error}".lower().replace("nvml", "NVML")}

    return {
        "index": index,
        "uuid": read(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        "name": read(lambda: _text(nvml.nvmlDeviceGetName(handle))),
        **_memory(read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))),
        "utilization": read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        "temperature_c": read(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        "power_w": read(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        "power_limit_w": read(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
    }


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
