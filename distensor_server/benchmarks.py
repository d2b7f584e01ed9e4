"""When devices are measured: once per driver, torch and boot, while nothing runs, or when the owner asks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from distensor.core.ids import DeviceId
from distensor.core.reading import Unavailable, value_or
from distensor_server.devices.detect import installed_torch
from distensor_server.devices.measured import Benchmark, from_answer, from_json, to_json
from distensor_server.devices.model import Device, foreign_processes
from distensor_server.feature import Feature
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.statedir import read_json, write_json

IDLE_SECONDS = 120.0
"""So long without a worker before a measurement begins by itself."""
BUSY_SHARE = 0.5
"""A CPU that is busier with other things would be measured wrongly, and its owner disturbed."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id(file: Path = BOOT_ID) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"  # macOS


class Benchmarks(Feature):
    """Keeps what was measured in the state directory and shows it with each device."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._path = node.state.root / "benchmarks.json"
        self._found: dict[DeviceId, Benchmark] = {}
        self._idle_since: float | None = None
        self._wanted: list[DeviceId] = []
        """Asked for by the owner, and not begun yet."""
        self._running: tuple[DeviceId, asyncio.Task[None]] | None = None
        self._suffix = ""

    def open(self) -> None:
        stored = read_json(self._path) or {}
        found = {DeviceId(name): from_json(value) for name, value in stored.get("devices", {}).items()}
        self._found = {name: benchmark for name, benchmark in found.items() if benchmark is not None}

    def methods(self) -> Mapping[str, Method]:
        return {"benchmark": self._on_asked}

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._cancelled_at_the_end(),)

    async def _cancelled_at_the_end(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._stop()

    def on_tick(self, picture: Picture) -> None:
        """Show, stop when there is work, begin when there has been none for a while."""
        if not picture.detected:
            return
        self._show(picture.devices)
        if any(worker.life.alive for worker in picture.workers):
            self._idle_since = None
            self._stop()
            return
        now = self._node.clock.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        if self._running is not None:
            return
        device = self._next(picture, idle=now - self._idle_since >= IDLE_SECONDS)
        if device is not None:
            self._running = (device.device_id, asyncio.ensure_future(self._measure(device)))

    def _show(self, devices: Sequence[Device]) -> None:
        """Hand the inventory what is known, marked as stale where it was measured in another state."""
        shown = {}
        for device in devices:
            benchmark = self._found.get(device.device_id)
            if benchmark is not None:
                stale = benchmark.key != self._key(device)
                shown[device.device_id] = Benchmark(
                    key=benchmark.key, at=benchmark.at, rates=benchmark.rates, stale=stale
                )
        self._node.inventory.measured = shown

    def _next(self, picture: Picture, *, idle: bool) -> Device | None:
        by_id = {device.device_id: device for device in picture.devices if device.unusable is None}
        while self._wanted:
            asked = by_id.get(self._wanted.pop(0))
            if asked is not None:
                return asked
        if not idle or self._node.refusal() is not None:
            return None
        due = [device for device in by_id.values() if self._is_due(device) and _is_quiet(device, picture)]
        return next(iter(due), None)

    def _is_due(self, device: Device) -> bool:
        known = self._found.get(device.device_id)
        return known is None or known.key != self._key(device)

    def _key(self, device: Device) -> str:
        if not self._suffix:
            self._suffix = f"torch {installed_torch()}, boot {boot_id()}"
        unique = value_or(device.uuid, device.device_id)
        return f"{unique}, driver {value_or(device.driver, 'unknown')}, {self._suffix}"

    async def _measure(self, device: Device) -> None:
        node, key = self._node, self._key(device)
        try:
            answer = await node.detector.measure(device, node.state.root, node.inventory.helper_pids)
        finally:
            self._running = None
        self._found[device.device_id] = from_answer(answer, key, node.clock.now())
        kept = {name: to_json(benchmark) for name, benchmark in self._found.items()}
        node.journal.guarded(lambda: write_json(self._path, {"v": 1, "devices": kept}, outlives_power=False))
        self._show(node.inventory.devices)
        if isinstance(answer, Unavailable):
            node.journal.add("warning", device.device_id, f"the benchmark failed: {answer.reason}")
        else:
            node.journal.add("info", device.device_id, "measured how fast it is")
        node.reconsider()

    def _stop(self) -> None:
        if self._running is not None:
            self._running[1].cancel()

    def _on_asked(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        name = params.get("device")
        if params.keys() - {"device"} or not isinstance(name, str | None):
            raise RequestError(code="bad_params", message="benchmark takes {} or {'device': id}")
        if self._node.workforce.running():
            raise RequestError(
                code="busy", message="a worker runs, and both would be slow", fix="ask again when no job runs"
            )
        usable = [d.device_id for d in self._node.inventory.devices if d.unusable is None]
        wanted = [device_id for device_id in usable if name in (None, device_id)]
        if not wanted:
            known = ", ".join(usable) or "none"
            raise RequestError(
                code="bad_params", message=f"no usable device {name!r:.60}", fix=f"usable devices: {known}"
            )
        self._wanted += [device_id for device_id in wanted if device_id not in self._wanted]
        return {"devices": wanted}


def _is_quiet(device: Device, picture: Picture) -> bool:
    foreign = foreign_processes(device, picture.own_pids)
    if not isinstance(foreign, Unavailable) and foreign:
        return False
    return value_or(device.utilization, 0.0) < BUSY_SHARE
