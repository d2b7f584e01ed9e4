"""Devices over time: one is lost, comes back, another is plugged in, and each is told once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import LOST, FakeNvml
from server_fakes import eventually, supervisor_running

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.reading import Unavailable
from distensor_server.config import Limits
from distensor_server.devices.answers import Answer
from distensor_server.devices.detect import Detector
from distensor_server.devices.families import Family, to_watch
from distensor_server.devices.host import Host, HostMemory
from distensor_server.devices.model import Device
from distensor_server.devices.nvidia import cuda_devices
from distensor_server.devices.nvml import Session
from distensor_server.inventory import Inventory

TORCH = {"version": "2.13.0", "cuda": True, "cuda_build": "13.0"}


class WatchedNvml(Detector):
    """The real reading of a fake NVML, in this process; the test says when it is read."""

    def __init__(self, nvml: FakeNvml) -> None:
        super().__init__(platform="linux")
        object.__setattr__(self, "nvml", nvml)
        object.__setattr__(self, "session", Session(nvml, Path("/nowhere")))
        object.__setattr__(self, "tell", None)
        object.__setattr__(self, "looked", [])

    def answer(self) -> Answer:
        found: Answer = self.session.sample()  # type: ignore[attr-defined]
        return found

    async def accelerators(self, memory: HostMemory) -> tuple[Device, ...]:
        self.looked.append(True)  # type: ignore[attr-defined]
        self.session.close()  # type: ignore[attr-defined]
        return cuda_devices(self.answer(), TORCH, memory)

    async def watch(self, family: Family, on_answer: Any) -> None:
        object.__setattr__(self, "tell", on_answer)
        await asyncio.get_running_loop().create_future()


def inventory_of(detector: Detector, told: list[tuple[str, str, str]]) -> Inventory:
    return Inventory(
        host=Host(),
        detector=detector,
        limits=Limits(cpu_workers=1),
        clock=SYSTEM_CLOCK,
        on_event=lambda *event: told.append(event),
        on_change=lambda: None,
    )


@pytest.mark.asyncio
async def test_a_gpu_is_lost_and_comes_back_without_a_restart() -> None:
    nvml = FakeNvml(count=2)
    detector: Any = WatchedNvml(nvml)
    told: list[tuple[str, str, str]] = []
    inventory = inventory_of(detector, told)
    await inventory.detect()
    task = asyncio.create_task(inventory.keep_up())
    await eventually(lambda: detector.tell, "it watches")
    nvml.errors = {("nvmlDeviceGetUtilizationRates", 1): LOST}
    for _ in range(3):
        detector.tell(detector.answer())
    well, gone = inventory.devices[:2]
    assert (well.unusable, gone.fault) == (None, True)
    assert "fallen off the bus" in (gone.unusable or "")
    assert [event for event in told if event[0] == "warning"] == [
        ("warning", "GPU-1", f"RTX 4090 cannot be used: {gone.unusable}")
    ]
    nvml.errors = {}
    detector.tell(detector.answer())
    assert [device.unusable for device in inventory.devices[:2]] == [None, None]
    assert told[-1] == ("info", "GPU-1", "RTX 4090 can be used")
    assert len(detector.looked) == 1, "watching was enough"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_gpu_that_is_plugged_in_is_found_at_once() -> None:
    nvml = FakeNvml(count=1)
    detector: Any = WatchedNvml(nvml)
    inventory = inventory_of(detector, [])
    await inventory.detect()
    task = asyncio.create_task(inventory.keep_up())
    await eventually(lambda: detector.tell, "it watches")
    nvml.count = 2
    detector.tell(detector.answer())
    await eventually(lambda: len(inventory.devices) == 3, "the new one is there")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_node_with_a_lost_gpu_is_degraded_and_goes_on(short_dir: Path) -> None:
    nvml = FakeNvml(count=2)
    detector: Any = WatchedNvml(nvml)
    async with supervisor_running(short_dir, detector=detector) as running:
        await running.connected()
        await eventually(lambda: detector.tell, "it watches")
        nvml.errors = {("nvmlDeviceGetHandleByIndex", 0): LOST}
        detector.tell(detector.answer())
        sections = running.supervisor.node.sections()
        assert sections["node"]["state"] == "DEGRADED"
        lost = sections["devices"][0]
        assert (lost["usable"], lost["fault"], lost["slots"], lost["utilization"]) == (False, True, 0, None)
        assert "fallen off the bus" in lost["unavailable"]["utilization"]
        assert [device.slots for device in running.supervisor.node.describe().devices][:2] == [0, 1]


@pytest.mark.asyncio
async def test_a_driver_that_is_gone_ends_the_readings_of_all() -> None:
    detector: Any = WatchedNvml(FakeNvml(count=2))
    inventory = inventory_of(detector, [])
    await inventory.detect()
    assert [family.word for family in to_watch(inventory.devices)] == ["cuda"]
    task = asyncio.create_task(inventory.keep_up())
    await eventually(lambda: detector.tell, "it watches")
    detector.tell(Unavailable(reason="the cuda watcher ended"))
    assert {device.unusable for device in inventory.devices[:2]} == {"the cuda watcher ended"}
    assert to_watch(inventory.devices) == ()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
