"""The readings of one moment, from the picture of the node and what was asked of its surroundings."""

from __future__ import annotations

from collections.abc import Sequence

from distensor.core.control import DeviceKind
from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.model import Device, foreign_processes
from distensor_server.gates.model import NOT_WATCHED, DeviceReadings, Readings
from distensor_server.gates.traffic import Traffic
from distensor_server.picture import Picture, WorkerView
from distensor_server.policy.policy import Policy
from distensor_server.surroundings.power import PowerSource


def take_readings(
    picture: Picture,
    policy: Policy,
    traffic: Traffic,
    *,
    idle: Reading[float],
    metered: Reading[bool],
    power: Reading[PowerSource],
    disk_free: Reading[int],
) -> Readings:
    """Only devices that can be used have gates of their own: the others have their reason already."""
    alive = [worker for worker in picture.workers if worker.life.alive]
    rates = [link for worker in alive for link in worker.links]
    host = next((device for device in picture.devices if device.kind is DeviceKind.CPU), None)
    return Readings(
        idle_seconds=idle,
        power=power,
        metered=metered,
        ram_free=NOT_WATCHED if host is None else _free(host),
        ram_own=sum(worker.rss or 0 for worker in alive),
        disk_free=disk_free,
        day_bytes=traffic.day,
        month_bytes=traffic.month,
        sent_rate=sum(link.sent_rate or 0.0 for link in rates),
        received_rate=sum(link.received_rate or 0.0 for link in rates),
        devices=tuple(
            _of_device(device, alive, picture.own_pids) for device in picture.devices if device.unusable is None
        ),
    )


def _of_device(device: Device, alive: Sequence[WorkerView], own_pids: frozenset[int]) -> DeviceReadings:
    return DeviceReadings(
        device_id=device.device_id,
        accelerator=device.kind is not DeviceKind.CPU,
        busy=any(worker.assignment.device_id == device.device_id for worker in alive),
        temperature_c=device.temperature_c,
        power_w=device.power_w,
        memory_free=_free(device),
        memory_own=_own_memory(device, own_pids),
        foreign_bytes=_foreign_bytes(device, own_pids),
    )


def _free(device: Device) -> Reading[int]:
    if isinstance(device.memory_total, Unavailable):
        return device.memory_total
    if isinstance(device.memory_used, Unavailable):
        return device.memory_used
    return max(0, device.memory_total - device.memory_used)


def _own_memory(device: Device, own_pids: frozenset[int]) -> int:
    if isinstance(device.processes, Unavailable):
        return 0
    own = [process.memory for process in device.processes if process.pid in own_pids]
    return sum(memory for memory in own if not isinstance(memory, Unavailable))


def _foreign_bytes(device: Device, own_pids: frozenset[int]) -> Reading[int]:
    """A program whose memory the driver does not tell counts nothing beside others, and is unknown when alone."""
    foreign = foreign_processes(device, own_pids)
    if isinstance(foreign, Unavailable):
        return foreign
    known = [process.memory for process in foreign if not isinstance(process.memory, Unavailable)]
    if foreign and not known:
        return Unavailable(reason="the driver does not tell how much memory other programs hold")
    return sum(known)
