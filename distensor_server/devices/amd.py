"""From the answers of the AMD probe to devices with their reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.answers import Answer, missing, number, torch_reason, word, words
from distensor_server.devices.model import Device, cannot_choose, lost, unread, with_readings
from distensor_server.devices.processes import processes_of

_NUMBERS = (
    "utilization",
    "memory_used",
    "memory_total",
    "temperature_c",
    "temperature_limit_c",
    "power_w",
    "power_limit_w",
    "fan",
    "clock_mhz",
    "clock_limit_mhz",
    "memory_clock_mhz",
)
_KFD = {
    "missing": "the kernel has no /dev/kfd: load the module amdgpu with ROCm support",
    "denied": "this user may not open /dev/kfd: `sudo usermod -aG render,video $USER`, then log in again",
}


def rocm_devices(answer: Answer, torch: Answer) -> tuple[Device, ...]:
    """The AMD GPUs. A probe that failed is one entry with the reason; a machine without an AMD GPU has none.

    One that the installed torch is not made for is no fault: most of them are graphics inside a CPU.
    """
    if isinstance(answer, Unavailable):
        return (_failed(answer.reason),)
    found = _listed(answer)
    reason = _KFD.get(str(answer.get("kfd"))) or torch_reason(torch, "rocm")
    meant = not isinstance(torch, Unavailable) and bool(torch.get("rocm_build"))
    return tuple(_with_verdict(device, cannot_choose(device, found) or reason, fault=meant) for device in found)


def _with_verdict(device: Device, reason: str | None, *, fault: bool) -> Device:
    if reason is None:
        return device
    return replace(device, blocked=reason, unusable=reason, fault=fault, slots=0)


def rocm_refreshed(devices: Sequence[Device], answer: Answer) -> tuple[Device, ...]:
    """The AMD GPUs among `devices` with the newest readings; one that has gone stays, with the reason."""
    if isinstance(answer, Unavailable):
        return tuple(lost(device, answer.reason) for device in devices)
    fresh = {device.device_id: device for device in _listed(answer)}
    return tuple(
        _with_verdict(fresh[device.device_id], device.blocked, fault=device.fault)
        if device.device_id in fresh
        else lost(device, "the kernel does not list it any more")
        for device in devices
    )


def rocm_unknown(devices: Sequence[Device], answer: Answer) -> bool:
    """Whether a GPU is listed that is not among `devices`."""
    if isinstance(answer, Unavailable):
        return False
    return bool({device.device_id for device in _listed(answer)} - {device.device_id for device in devices})


def _failed(reason: str) -> Device:
    device = Device(
        device_id=DeviceId("rocm"),
        kind=DeviceKind.ROCM,
        name="AMD GPU",
        slots=0,
        unusable=f"the AMD probe failed: {reason}",
        fault=True,
    )
    return unread(device, "no device")


def _listed(answer: Mapping[str, Any]) -> tuple[Device, ...]:
    rocm = words(answer, "rocm")
    return tuple(_device(entry, rocm) for entry in answer.get("devices", ()) if entry.get("module") == "amdgpu")


def _device(entry: Mapping[str, Any], rocm: str | Unavailable) -> Device:
    unique = words(entry, "unique_id")
    uuid = unique if isinstance(unique, Unavailable) else f"GPU-{unique.lower()}"
    bus = word(entry, "bus", str(entry.get("index", 0)))
    device = Device(
        device_id=DeviceId(f"rocm:{bus}" if isinstance(uuid, Unavailable) else uuid),
        kind=DeviceKind.ROCM,
        name=word(entry, "name", "AMD GPU"),
        slots=1,
        uuid=uuid,
        driver=words(entry, "driver"),
        runtime=rocm if isinstance(rocm, Unavailable) else f"ROCm {rocm}",
        bus=words(entry, "bus"),
        processes=processes_of(entry),
    )
    found: dict[str, Any] = {name: number(entry, name) for name in _NUMBERS}
    if "energy_j" in entry:
        found["energy_j"] = number(entry, "energy_j")
    if "throttle" in entry:
        found["throttle"] = _throttle(entry["throttle"])
    return unread(with_readings(device, found), "sysfs does not tell")


def _throttle(value: Any) -> Reading[tuple[str, ...]]:
    return tuple(str(word) for word in value) if isinstance(value, list) else missing(value)
