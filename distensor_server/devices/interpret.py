"""From the answers of the probe children to devices with their reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device
from distensor_server.devices.nvml import LIBRARY_NOT_FOUND

Answer: TypeAlias = Mapping[str, Any] | Unavailable
"""What a probe child printed, or why it printed nothing."""


def cuda_devices(nvml: Answer, torch: Answer, memory: HostMemory) -> tuple[Device, ...]:
    """The NVIDIA devices; one entry that says why when a machine that may have one shows none.

    `torch` is asked only when NVML found some.
    """
    if isinstance(nvml, Unavailable):
        return (_no_cuda(f"the NVML probe failed: {nvml.reason}", fault=True),)
    if "error" in nvml:
        error = nvml["error"]
        if error.get("code") == LIBRARY_NOT_FOUND and nvml.get("hardware") is False:
            return ()  # neither a driver nor a card: nothing that its owner could miss
        return (_no_cuda(_error_text(error), fault=error.get("code") != LIBRARY_NOT_FOUND),)
    found = tuple(_cuda_device(entry, memory) for entry in nvml.get("devices", ()))
    if not found:
        return (_no_cuda("NVML is there but lists no device", fault=False),)
    reason = torch_reason(torch, "cuda")
    return tuple(
        replace(device, unusable=reason, fault=True) if reason and not device.unusable else device for device in found
    )


def torch_reason(torch: Answer, backend: str) -> str | None:
    """Why torch cannot use `backend` here; None when it can."""
    if isinstance(torch, Unavailable):
        return f"the torch probe failed: {torch.reason}"
    if "error" in torch:
        return _error_text(torch["error"])
    if torch.get(backend):
        return None
    version = torch.get("version", "unknown")
    if not torch.get(f"{backend}_build"):
        return f"the installed torch {version} is built without {backend.upper()}; install a build that has it"
    return f"torch {version} cannot open {backend.upper()} here"


def apple_devices(torch: Answer, mlx: Answer, memory: HostMemory) -> tuple[Device, ...]:
    """The Apple GPU once by each way that could drive it; workers of this version use torch (MPS)."""
    reason = torch_reason(torch, "mps")
    mps = Device(
        device_id=DeviceId("mps"),
        kind=DeviceKind.MPS,
        name="Apple GPU (MPS)",
        slots=1,
        unusable=reason,
        fault=reason is not None,
        memory_total=memory.total,
        memory_used=memory.total - memory.free,
    )
    return mps, _mlx_device(mlx)


def _mlx_device(mlx: Answer) -> Device:
    if isinstance(mlx, Unavailable):
        reason = f"the mlx probe failed: {mlx.reason}"
    elif "error" in mlx:
        reason = _error_text(mlx["error"])
    elif not mlx.get("metal"):
        reason = "mlx finds no Metal device"
    else:
        reason = "workers of this version run torch; the same GPU is offered as mps"
    return Device(device_id=DeviceId("mlx"), kind=DeviceKind.MLX, name="Apple GPU (MLX)", slots=0, unusable=reason)


def cuda_failed(nvml: Answer) -> str | None:
    """Why NVML as a whole has nothing to say any more; None while it answers."""
    if isinstance(nvml, Unavailable):
        return nvml.reason
    return _error_text(nvml["error"]) if "error" in nvml else None


def with_nvml(device: Device, nvml: Answer, memory: HostMemory) -> Device:
    """`device` with the newest readings of NVML."""
    if isinstance(nvml, Unavailable) or "error" in nvml:
        return device
    for entry in nvml.get("devices", ()):
        fresh = _cuda_device(entry, memory)
        if fresh.device_id == device.device_id:
            return replace(fresh, unusable=fresh.unusable or device.unusable, fault=fresh.fault or device.fault)
    return device


def _no_cuda(reason: str, *, fault: bool) -> Device:
    nothing = Unavailable(reason="no device")
    return Device(
        device_id=DeviceId("cuda"),
        kind=DeviceKind.CUDA,
        name="NVIDIA GPU",
        slots=0,
        unusable=reason,
        fault=fault,
        utilization=nothing,
        memory_used=nothing,
        memory_total=nothing,
        temperature_c=nothing,
        power_w=nothing,
        power_limit_w=nothing,
    )


def _cuda_device(entry: Mapping[str, Any], memory: HostMemory) -> Device:
    index = entry.get("index", 0)
    if "error" in entry:
        broken = _no_cuda(_error_text(entry["error"]), fault=True)
        return replace(broken, device_id=DeviceId(f"cuda:{index}"), name=f"NVIDIA GPU {index}")
    total, used = _reading(entry, "memory_total"), _reading(entry, "memory_used")
    if isinstance(total, Unavailable):
        # A GPU that shares the machine's memory has none of its own to report (GB10, Jetson).
        total, used = memory.total, memory.total - memory.free
    return Device(
        device_id=DeviceId(_word(entry, "uuid", f"cuda:{index}")),
        kind=DeviceKind.CUDA,
        name=_word(entry, "name", f"NVIDIA GPU {index}"),
        slots=1,
        utilization=_reading(entry, "utilization"),
        memory_used=used,
        memory_total=total,
        temperature_c=_reading(entry, "temperature_c"),
        power_w=_reading(entry, "power_w"),
        power_limit_w=_reading(entry, "power_limit_w"),
    )


def _reading(entry: Mapping[str, Any], name: str) -> Reading[Any]:
    value = entry.get(name)
    if isinstance(value, int | float):
        return value
    return Unavailable(reason=value.get("unavailable", "unknown") if isinstance(value, dict) else "not reported")


def _word(entry: Mapping[str, Any], name: str, default: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) and value else default


def _error_text(error: Mapping[str, Any]) -> str:
    code = f"NVML error {error['code']}: " if error.get("code") else ""
    hint = f"; {error['hint']}" if error.get("hint") else ""
    return f"{code}{error.get('message', 'unknown')}{hint}"
