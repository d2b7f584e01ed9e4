"""The processes on a device, from the answer of a probe child. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distensor.core.reading import Reading, Unavailable
from distensor_server.devices.answers import missing, number, word, words
from distensor_server.devices.model import DeviceProcess


def processes_of(entry: Mapping[str, Any]) -> Reading[tuple[DeviceProcess, ...]]:
    found = entry.get("processes")
    if not isinstance(found, list):
        return missing(found)
    return tuple(_process(item) for item in found if isinstance(item, dict) and isinstance(item.get("pid"), int))


def _process(item: Mapping[str, Any]) -> DeviceProcess:
    memory = number(item, "memory")
    return DeviceProcess(
        pid=item["pid"],
        name=words(item, "name"),
        type=word(item, "type", "compute"),
        memory=Unavailable(reason="not told for each process") if "memory" not in item else memory,
        utilization=number(item, "utilization"),
    )
