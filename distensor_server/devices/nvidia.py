"""From NVML's answers to devices with their reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.answers import Answer, error_text, number, torch_reason, word, words
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device, cannot_choose, lost, unread, with_readings
from distensor_server.devices.nvml import LIBRARY_NOT_FOUND
from distensor_server.devices.processes import processes_of

THROTTLE_WORDS: Mapping[int, str] = {
    0x002: "clocks fixed by a setting",
    0x004: "power limit",
    0x008: "slowed down by the hardware",
    0x010: "in step with another GPU (sync boost)",
    0x020: "heat",
    0x040: "heat (hardware)",
    0x080: "power supply (hardware)",
    0x100: "display clocks",
    0x200: "limit of the board",
    0x400: "reliability limit",
}
"""Bits of nvmlClocksEventReasons. 1 says that the GPU is idle, which holds nothing back."""
NO_DEVICE = "no device"
NOT_FOR_INSTANCES = "not told for a MIG instance"
ENDED = "NVML does not list it any more"


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
        return (_no_cuda(error_text(error), fault=error.get("code") != LIBRARY_NOT_FOUND),)
    found = _listed(nvml, memory)
    if not found:
        return (_no_cuda("NVML is there but lists no device", fault=False),)
    reason = torch_reason(torch, "cuda")
    return tuple(_with_verdict(device, cannot_choose(device, found) or reason) for device in found)


def _with_verdict(device: Device, reason: str | None) -> Device:
    """A device that has a reason of its own keeps it."""
    if reason is None or device.unusable:
        return replace(device, blocked=reason)
    return replace(device, blocked=reason, unusable=reason, fault=True)


def cuda_failed(nvml: Answer) -> str | None:
    """Why NVML as a whole has nothing to say any more; None while it answers."""
    if isinstance(nvml, Unavailable):
        return nvml.reason
    return error_text(nvml["error"]) if "error" in nvml else None


def refreshed(devices: Sequence[Device], nvml: Answer, memory: HostMemory) -> tuple[Device, ...]:
    """The NVIDIA devices among `devices` with the newest readings; a device that has gone stays, with the reason."""
    reason = cuda_failed(nvml)
    if reason is not None:
        return tuple(lost(device, reason) for device in devices)
    assert not isinstance(nvml, Unavailable)
    fresh = {device.device_id: device for device in _listed(nvml, memory)}
    broken = {e.get("index"): error_text(e["error"]) for e in nvml.get("devices", ()) if "error" in e}
    unlisted = " and ".join(broken.values()) or ENDED
    return tuple(
        _with_verdict(fresh[device.device_id], device.blocked) if device.device_id in fresh else lost(device, unlisted)
        for device in devices
    )


def unknown_devices(devices: Sequence[Device], nvml: Answer) -> bool:
    """Whether NVML lists a working device that is not among `devices`: one was plugged in, or cut into instances."""
    if isinstance(nvml, Unavailable) or "error" in nvml:
        return False
    known = {device.device_id for device in devices}
    entries = [entry for entry in nvml.get("devices", ()) if "error" not in entry]
    listed = [*entries, *(instance for entry in entries for instance in entry.get("mig") or ())]
    return any(isinstance(entry.get("uuid"), str) and entry["uuid"] not in known for entry in listed)


def _listed(nvml: Mapping[str, Any], memory: HostMemory) -> tuple[Device, ...]:
    return tuple(device for entry in nvml.get("devices", ()) for device in _gpu_and_instances(entry, memory))


def _gpu_and_instances(entry: Mapping[str, Any], memory: HostMemory) -> tuple[Device, ...]:
    gpu = _cuda_device(entry, memory)
    instances = entry.get("mig")
    if instances is None:
        return (gpu,)
    if not instances:
        why = "MIG is on and there are no instances: make some with `nvidia-smi mig -cgi ... -C`, or turn MIG off"
        return (replace(gpu, slots=0, unusable=why, fault=True),)
    whole = replace(gpu, slots=0, unusable="MIG is on: its instances are offered in its place")
    return (whole, *(_instance(instance, number_, gpu, memory) for number_, instance in enumerate(instances)))


def _instance(entry: Mapping[str, Any], place: int, gpu: Device, memory: HostMemory) -> Device:
    name = word(entry, "name", f"{gpu.name} MIG {place}")
    total, used, unified = _memory(entry, memory)
    device = Device(
        device_id=DeviceId(word(entry, "uuid", f"{gpu.device_id}/{place}")),
        kind=DeviceKind.CUDA,
        name=name,
        slots=1,
        uuid=word(entry, "uuid", "") or Unavailable(reason="not reported"),
        driver=gpu.driver,
        runtime=gpu.runtime,
        bus=gpu.bus,
        parent=gpu.device_id,
        profile=name.partition(" MIG ")[2] or None,
        unified_memory=unified,
        memory_used=used,
        memory_total=total,
        temperature_c=gpu.temperature_c,
        temperature_limit_c=gpu.temperature_limit_c,
        throttle=gpu.throttle,
        processes=processes_of(entry),
    )
    return unread(device, NOT_FOR_INSTANCES)


def _no_cuda(reason: str, *, fault: bool) -> Device:
    device = Device(
        device_id=DeviceId("cuda"), kind=DeviceKind.CUDA, name="NVIDIA GPU", slots=0, unusable=reason, fault=fault
    )
    return unread(device, NO_DEVICE)


def _cuda_device(entry: Mapping[str, Any], memory: HostMemory) -> Device:
    index = entry.get("index", 0)
    if "error" in entry:
        broken = _no_cuda(error_text(entry["error"]), fault=True)
        return replace(broken, device_id=DeviceId(f"cuda:{index}"), name=f"NVIDIA GPU {index}")
    total, used, unified = _memory(entry, memory)
    names = ("utilization", "temperature_c", "temperature_limit_c", "power_w", "power_limit_w", "energy_j", "fan")
    clocks = ("clock_mhz", "clock_limit_mhz", "memory_clock_mhz")
    plain = Device(
        device_id=DeviceId(word(entry, "uuid", f"cuda:{index}")),
        kind=DeviceKind.CUDA,
        name=word(entry, "name", f"NVIDIA GPU {index}"),
        slots=1,
        uuid=words(entry, "uuid"),
        driver=words(entry, "driver"),
        runtime=_cuda_version(entry),
        bus=words(entry, "bus"),
        cores=number(entry, "cores"),
        unified_memory=unified,
        memory_used=used,
        memory_total=total,
        throttle=_throttle(entry),
        processes=processes_of(entry),
    )
    return with_readings(plain, {name: number(entry, name) for name in (*names, *clocks)})


def _memory(entry: Mapping[str, Any], memory: HostMemory) -> tuple[Reading[int], Reading[int], bool]:
    """Total, used, and whether they are the machine's: a GB10 or a Jetson has no memory of its own to report."""
    total, used = number(entry, "memory_total"), number(entry, "memory_used")
    if isinstance(total, Unavailable):
        return memory.total, memory.total - memory.free, True
    return total, used, False


def _cuda_version(entry: Mapping[str, Any]) -> Reading[str]:
    """13000 is CUDA 13.0: the newest that the driver can run."""
    found = number(entry, "cuda")
    return found if isinstance(found, Unavailable) else f"CUDA {found // 1000}.{found % 1000 // 10}"


def _throttle(entry: Mapping[str, Any]) -> Reading[tuple[str, ...]]:
    bits = number(entry, "throttle")
    if isinstance(bits, Unavailable):
        return bits
    known = tuple(text for bit, text in THROTTLE_WORDS.items() if bits & bit)
    rest = bits & ~sum(THROTTLE_WORDS) & ~1
    return (*known, f"reason 0x{rest:x} of NVML") if rest else known
