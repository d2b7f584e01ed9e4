"""The Apple GPU, from what the probe children say. Pure."""

from __future__ import annotations

from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Unavailable
from distensor_server.devices.answers import Answer, error_text, torch_reason
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device, unread


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
        blocked=reason,
        unified_memory=True,
        memory_total=memory.total,
        memory_used=memory.total - memory.free,
    )
    return mps, _mlx_device(mlx)


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
    return unread(device, "the same GPU as mps, which has the readings")
