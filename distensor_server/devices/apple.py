"""The Apple GPU, from what the probe children say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.answers import Answer, error_text, number, torch_reason, word, words
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device, unread, with_readings
from distensor_server.devices.processor import machine_uuid

NO_SENSOR = "macOS does not tell"
SAME_GPU = "the same GPU as mps, which has the readings"


def apple_devices(torch: Answer, mlx: Answer, apple: Answer, memory: HostMemory) -> tuple[Device, ...]:
    """The Apple GPU once by each way that could drive it; workers of this version use torch (MPS)."""
    reason = torch_reason(torch, "mps")
    limit = Unavailable(reason="torch does not tell") if isinstance(torch, Unavailable) else number(torch, "mps_memory")
    mps = Device(
        device_id=DeviceId("mps"),
        kind=DeviceKind.MPS,
        name="Apple GPU (MPS)",
        slots=1,
        unusable=reason,
        fault=reason is not None,
        blocked=reason,
        unified_memory=True,
        memory_total=memory.total if isinstance(limit, Unavailable) else min(limit, memory.total),
    )
    return _with_readings(mps, apple, memory), _mlx_device(mlx)


def apple_refreshed(devices: Sequence[Device], apple: Answer, memory: HostMemory) -> tuple[Device, ...]:
    """The devices with the newest readings. Without any the GPU still works: Metal does not need ioreg."""
    return tuple(
        _with_readings(device, apple, memory) if device.kind is DeviceKind.MPS else device for device in devices
    )


def _with_readings(device: Device, apple: Answer, memory: HostMemory) -> Device:
    told: Mapping[str, Any] = {} if isinstance(apple, Unavailable) else apple
    found: dict[str, Reading[Any]] = {
        "uuid": _uuid(words(told, "platform_uuid")),
        "driver": _prefixed("macOS ", words(told, "system")),
        "cores": number(told, "cores"),
        "utilization": number(told, "utilization"),
        "power_w": number(told, "power_w"),
        "throttle": _throttle(number(told, "heat")),
        "memory_used": _used(device.memory_total, number(told, "gpu_memory"), memory),
    }
    if isinstance(apple, Unavailable):
        found |= {name: apple for name, value in found.items() if isinstance(value, Unavailable)}
    chip = word(told, "chip", "")
    named = replace(device, name=f"{chip} GPU (MPS)") if chip else device
    return unread(with_readings(named, found), NO_SENSOR)


def _used(total: Reading[int], by_gpu: Reading[int], memory: HostMemory) -> Reading[int]:
    """What is left is what Metal's working set leaves, and no more than the machine has free."""
    if isinstance(total, Unavailable):
        return total
    left = min(total if isinstance(by_gpu, Unavailable) else total - by_gpu, memory.free)
    return total - max(0, left)


def _uuid(platform: Reading[str]) -> Reading[str]:
    return platform if isinstance(platform, Unavailable) else f"MPS-{machine_uuid(platform)}"


def _prefixed(prefix: str, value: Reading[str]) -> Reading[str]:
    return value if isinstance(value, Unavailable) else prefix + value


def _throttle(speed: Reading[int]) -> Reading[tuple[str, ...]]:
    if isinstance(speed, Unavailable):
        return speed
    return (f"heat: the system runs at {speed} %",) if speed < 100 else ()


def _mlx_device(mlx: Answer) -> Device:
    if isinstance(mlx, Unavailable):
        reason = f"the mlx probe failed: {mlx.reason}"
    elif "error" in mlx:
        reason = error_text(mlx["error"])
    elif not mlx.get("metal"):
        reason = "mlx finds no Metal device"
    else:
        reason = "workers of this version run torch; the same GPU is offered as mps"
    device = Device(device_id=DeviceId("mlx"), kind=DeviceKind.MLX, name="Apple GPU (MLX)", slots=0, unusable=reason)
    return unread(device, SAME_GPU)
