"""The kinds of accelerators that are watched: how each takes a new answer of its child. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from distensor.core.control import DeviceKind
from distensor_server.devices.amd import rocm_refreshed, rocm_unknown
from distensor_server.devices.answers import Answer, no_answer
from distensor_server.devices.apple import apple_refreshed
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device
from distensor_server.devices.nvidia import cuda_failed, refreshed, unknown_devices

Devices: TypeAlias = tuple[Device, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`word` is what the probe child calls it."""

    word: str
    kind: DeviceKind
    refreshed: Callable[[Sequence[Device], Answer, HostMemory], Devices]
    has_new: Callable[[Sequence[Device], Answer], bool]
    failed: Callable[[Answer], str | None]
    """Why there is nothing to watch any more."""


WATCHED = (
    Family(word="cuda", kind=DeviceKind.CUDA, refreshed=refreshed, has_new=unknown_devices, failed=cuda_failed),
    Family(
        word="rocm",
        kind=DeviceKind.ROCM,
        refreshed=lambda devices, answer, _memory: rocm_refreshed(devices, answer),
        has_new=rocm_unknown,
        failed=no_answer,
    ),
    Family(
        word="apple",
        kind=DeviceKind.MPS,
        refreshed=apple_refreshed,
        has_new=lambda _devices, _answer: False,
        failed=no_answer,
    ),
)


def to_watch(devices: Sequence[Device]) -> tuple[Family, ...]:
    """The families that have a usable device."""
    kinds = {device.kind for device in devices if device.unusable is None}
    return tuple(family for family in WATCHED if family.kind in kinds)
