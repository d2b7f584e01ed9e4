"""The section `devices` of the local protocol. Pure; every value is plain JSON."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from distensor.core.reading import Reading, Unavailable, value_or
from distensor_server.devices.measured import Benchmark, to_json
from distensor_server.devices.model import FACTS, NUMBERS, Device, DeviceProcess, readings
from distensor_server.picture import WorkerView

DIGITS = {"energy_j": 0, "clock_mhz": 0, "memory_clock_mhz": 0}
"""Digits after the point where three would only be noise."""


def device_section(device: Device, workers: Sequence[WorkerView], own_pids: Set[int]) -> dict[str, Any]:
    """One device. A reading that is not available is null, and its reason stands in `unavailable`."""
    own = [w.worker_id for w in workers if w.assignment.device_id == device.device_id and w.life.alive]
    found = readings(device)
    return {
        "id": device.device_id,
        "kind": device.kind.value,
        "name": device.name,
        "usable": device.unusable is None,
        "reason": device.unusable,
        "fault": device.fault,
        "slots": 0 if device.unusable else device.slots,
        "parent": device.parent,
        "profile": device.profile,
        "unified_memory": device.unified_memory,
        **{name: value_or(getattr(device, name), None) for name in FACTS},
        **{name: rounded(getattr(device, name), DIGITS.get(name, 3)) for name in NUMBERS},
        "throttle": _throttle(device.throttle),
        "processes": _processes(device.processes, own_pids),
        "benchmark": None if device.benchmark is None else _benchmark(device.benchmark),
        "workers": own,
        "unavailable": {name: value.reason for name, value in found.items() if isinstance(value, Unavailable)},
    }


def _benchmark(benchmark: Benchmark) -> dict[str, Any]:
    told = to_json(benchmark)
    return {"at": told["at"], "stale": benchmark.stale, **told["rates"]}


def _throttle(reading: Reading[tuple[str, ...]]) -> list[str] | None:
    return None if isinstance(reading, Unavailable) else list(reading)


def _processes(reading: Reading[tuple[DeviceProcess, ...]], own_pids: Set[int]) -> list[dict[str, Any]] | None:
    return None if isinstance(reading, Unavailable) else [_process(process, own_pids) for process in reading]


def _process(process: DeviceProcess, own_pids: Set[int]) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "name": value_or(process.name, None),
        "type": process.type,
        "memory": value_or(process.memory, None),
        "utilization": rounded(process.utilization, 2),
        "owner": process.owner(own_pids).value,
    }


def rounded(value: Reading[float] | None, digits: int) -> float | None:
    """None where there is no reading. Rounded, so that noise below what anyone reads causes no delta."""
    if value is None or isinstance(value, Unavailable):
        return None
    return value if isinstance(value, int) else round(value, digits)
