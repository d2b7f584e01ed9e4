"""The devices of this node over time: found at the start, sampled every other second, looked for again later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from distensor.core.clock import Clock
from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor_server.config import Limits
from distensor_server.devices.answers import Answer
from distensor_server.devices.detect import Detector
from distensor_server.devices.families import Family, to_watch
from distensor_server.devices.host import Host, HostSample, cpu_device, cpu_name, threads_per_worker, with_sample
from distensor_server.devices.measured import Benchmark
from distensor_server.devices.model import Device

FIRST_REPROBE_SECONDS = 60.0
LONGEST_REPROBE_SECONDS = 600.0
MEMORY_SHARE = 0.9
"""Of the machine's memory that CPU workers may plan with; the rest is for the system and this process."""


class Inventory:
    """`devices` is always complete: also what cannot be used is there, with its reason."""

    def __init__(
        self,
        *,
        host: Host,
        detector: Detector,
        limits: Limits,
        clock: Clock,
        on_event: Callable[[str, str, str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._host = host
        self._detector = detector
        self._clock = clock
        self._on_event = on_event
        self._on_change = on_change
        self._sample: HostSample = host.sample()
        self._cpu = cpu_device(self._sample, slots=limits.cpu_workers, name=cpu_name())
        self._accelerators: tuple[Device, ...] = ()
        self.measured: Mapping[DeviceId, Benchmark] = {}
        self.helper_pids: set[int] = set()
        """Processes of ours that use devices and are no workers."""
        self.detected = False
        self._woken = asyncio.Event()

    @property
    def devices(self) -> tuple[Device, ...]:
        found = (*self._accelerators, self._cpu)
        return tuple(replace(device, benchmark=self.measured.get(device.device_id)) for device in found)

    def find(self, device_id: DeviceId) -> Device | None:
        return next((device for device in self.devices if device.device_id == device_id), None)

    def set_limits(self, limits: Limits) -> None:
        self._cpu = cpu_device(self._sample, slots=limits.cpu_workers, name=self._cpu.name)

    def refresh(self) -> None:
        """Read CPU and memory again; cheap."""
        self._sample = self._host.sample()
        self._cpu = with_sample(self._cpu, self._sample)

    def share(self, device: Device) -> tuple[int | None, int]:
        """Memory limit and threads of one worker on `device`."""
        slots = sum(item.slots for item in self.devices if item.unusable is None)
        threads = threads_per_worker(self._sample.cpus, slots)
        if device.kind is not DeviceKind.CPU:
            return None, threads
        return int(self._sample.memory.total * MEMORY_SHARE) // max(1, device.slots), threads

    async def detect(self) -> None:
        """Look for accelerators, in children with time limits."""
        found = await self._detector.accelerators(self._sample.memory)
        self._replace_accelerators(found)
        self.detected = True
        self._on_change()

    async def keep_up(self) -> None:
        """Watch accelerators while there are usable ones; otherwise look again from time to time."""
        delay = FIRST_REPROBE_SECONDS
        while True:
            families = to_watch(self._accelerators)
            if families:
                await self._or_woken(self._watch(families))
                delay = FIRST_REPROBE_SECONDS
            if not self._woken.is_set():
                await self._or_woken(self._clock.sleep_async(delay))
            delay = FIRST_REPROBE_SECONDS if self._woken.is_set() else min(LONGEST_REPROBE_SECONDS, delay * 2)
            self._woken.clear()
            await self.detect()

    def wake(self) -> None:
        """Look for all devices now: the machine slept, or a device has come."""
        self._woken.set()

    async def _or_woken(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Until `coroutine` ends or `wake` is called."""
        tasks = [asyncio.ensure_future(coroutine), asyncio.ensure_future(self._woken.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _watch(self, families: Sequence[Family]) -> None:
        """All of them, until the first has nothing more to say."""
        tasks = [asyncio.ensure_future(self._detector.watch(f, partial(self._on_answer, f))) for f in families]
        tasks.append(asyncio.ensure_future(self._miss_devices()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _miss_devices(self) -> None:
        """Until a device has been at fault for long: a look at all of them may bring it back."""
        while True:
            await self._clock.sleep_async(LONGEST_REPROBE_SECONDS)
            if any(device.fault for device in self._accelerators):
                self.wake()
                return

    def _on_answer(self, family: Family, answer: Answer) -> None:
        mine = tuple(device for device in self._accelerators if device.kind is family.kind)
        if family.has_new(mine, answer):
            self.wake()
        fresh = {device.device_id: device for device in family.refreshed(mine, answer, self._sample.memory)}
        self._replace_accelerators(tuple(fresh.get(device.device_id, device) for device in self._accelerators))
        self._on_change()

    def _replace_accelerators(self, found: tuple[Device, ...]) -> None:
        before = {device.device_id: device.unusable for device in self._accelerators}
        for device in found:
            if before.get(device.device_id, "") != device.unusable:
                self._tell(device)
        for device_id in before.keys() - {device.device_id for device in found}:
            self._on_event("warning", device_id, "is not there any more")
        self._accelerators = found

    def _tell(self, device: Device) -> None:
        if device.unusable is None:
            self._on_event("info", device.device_id, f"{device.name} can be used")
        else:
            severity = "warning" if device.fault else "info"
            self._on_event(severity, device.device_id, f"{device.name} cannot be used: {device.unusable}")
