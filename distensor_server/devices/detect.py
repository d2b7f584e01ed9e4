"""Runs the probe children, each with a time limit, and watches what they found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distensor.core.control import DeviceKind
from distensor.core.reading import Unavailable
from distensor_server.devices.amd import rocm_devices
from distensor_server.devices.amdgpu import has_amd
from distensor_server.devices.answers import Answer
from distensor_server.devices.apple import apple_devices
from distensor_server.devices.families import Family
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device
from distensor_server.devices.nvidia import cuda_devices
from distensor_server.environment import scrubbed
from distensor_server.exits import signal_name

PROBE = (sys.executable, "-m", "distensor_server.devices.probe")
BENCHMARK = (sys.executable, "-m", "distensor_server.devices.benchmark")
BENCHMARK_SECONDS = 1.0
"""For each of the three measures that run on the device."""
TORCH_NAMES = {
    DeviceKind.CPU: "cpu",
    DeviceKind.CUDA: "cuda",
    DeviceKind.ROCM: "cuda",
    DeviceKind.MPS: "mps",
}
QUICK_SECONDS = 10.0
TORCH_SECONDS = 90.0
"""Importing torch from a cold disk takes tens of seconds."""
SILENT_SECONDS = 10.0
_MAX_ANSWER = 1 << 20
NOTHING: Answer = {"devices": []}


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """Finds accelerators. `command` is what a family's name is appended to."""

    command: Sequence[str] = PROBE
    platform: str = sys.platform
    quick_seconds: float = QUICK_SECONDS
    torch_seconds: float = TORCH_SECONDS
    root: Path = Path("/")
    torch_version: Callable[[], str] = lambda: installed_torch()
    benchmark_command: Sequence[str] = BENCHMARK
    verdicts: dict[str, str | None] = field(default_factory=dict)
    """Results of self-tests by device, driver and torch."""

    async def accelerators(self, memory: HostMemory) -> tuple[Device, ...]:
        if self.platform == "darwin":
            torch, mlx, apple = await asyncio.gather(
                self.ask("torch", self.torch_seconds),
                self.ask("mlx", self.quick_seconds),
                self.ask("apple", self.quick_seconds),
            )
            found = apple_devices(torch, mlx, apple, memory)
            return tuple([await self._tested(device, torch) for device in found])
        nvml = await self.ask("cuda", self.quick_seconds)
        amd = await self.ask("rocm", self.quick_seconds) if has_amd(self.root) else NOTHING
        torch = await self._torch_for(nvml, amd)
        found = (*cuda_devices(nvml, torch, memory), *rocm_devices(amd, torch))
        return tuple([await self._tested(device, torch) for device in found])

    async def _torch_for(self, nvml: Answer, amd: Answer) -> Answer:
        """Torch costs seconds and 200 MB: it is asked only when there is a device that it could open."""
        cuda = not isinstance(nvml, Unavailable) and nvml.get("devices")
        rocm = not isinstance(amd, Unavailable) and amd.get("devices") and amd.get("kfd") == "ok"
        if cuda or (rocm and "rocm" in self.torch_version()):
            return await self.ask("torch", self.torch_seconds)
        # The name of the version says what a build is made for; enough for a GPU inside a CPU that nobody asked for.
        return {"version": self.torch_version()} if rocm else Unavailable(reason="not asked")

    async def _tested(self, device: Device, torch: Answer) -> Device:
        """An accelerator is offered after it has computed what the CPU computes; once for each driver and torch."""
        if device.unusable is not None:
            return device
        key = f"{device.device_id} {device.driver} {torch}"
        reason = self.verdicts.get(key, "")
        if reason == "":
            answer = await self.ask(("selftest", TORCH_NAMES[device.kind]), self.torch_seconds, visible(device))
            reason = verdict(answer)
            if not isinstance(answer, Unavailable):  # a child that failed is tried again with the next look
                self.verdicts[key] = reason
        return replace(device, unusable=reason, blocked=reason, fault=True) if reason else device

    async def measure(self, device: Device, folder: Path, pids: set[int]) -> Answer:
        """A benchmark of one device, which takes seconds. While it runs its process id is in `pids`."""
        command = [*self.benchmark_command, TORCH_NAMES[device.kind], f"{BENCHMARK_SECONDS:g}", str(folder)]
        return await _answer(command, self.torch_seconds, visible(device), pids)

    async def ask(
        self, family: str | Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
    ) -> Answer:
        """One child's answer; it is killed when it takes longer than `seconds`."""
        words = (family,) if isinstance(family, str) else family
        return await _answer([*self.command, *words], seconds, variables or {}, set())

    async def watch(self, family: Family, on_answer: Callable[[Answer], None]) -> None:
        """Call `on_answer` with each answer of the family's child until cancelled, or until one was no good."""
        async with _child([*self.command, "watch", family.word], stderr=asyncio.subprocess.DEVNULL) as process:
            assert process.stdout is not None
            while True:
                try:
                    line = await asyncio.wait_for(process.stdout.readline(), SILENT_SECONDS)
                except (TimeoutError, ValueError):
                    # ValueError: a line over the reader's limit.
                    on_answer(Unavailable(reason=f"the {family.word} watcher is silent for {SILENT_SECONDS:g} s"))
                    return
                if not line:
                    on_answer(Unavailable(reason=f"the {family.word} watcher ended"))
                    return
                answer = read_answer(line, b"", 0)
                on_answer(answer)
                if family.failed(answer):
                    return


async def _answer(command: Sequence[str], seconds: float, variables: Mapping[str, str], pids: set[int]) -> Answer:
    async with _child(command, variables=variables) as process:
        pids.add(process.pid)
        try:
            out, err = await asyncio.wait_for(process.communicate(), seconds)
        except TimeoutError:
            return Unavailable(reason=f"no answer within {seconds:g} s (the driver may be wedged)")
        finally:
            pids.discard(process.pid)
    assert process.returncode is not None
    return read_answer(out, err, process.returncode)


def visible(device: Device) -> dict[str, str]:
    """The environment in which a process sees this accelerator and no other, whatever the order of this boot."""
    if isinstance(device.uuid, Unavailable):
        return {}
    name = {DeviceKind.CUDA: "CUDA_VISIBLE_DEVICES", DeviceKind.ROCM: "ROCR_VISIBLE_DEVICES"}.get(device.kind)
    return {} if name is None else {name: device.uuid}


def verdict(selftest: Answer) -> str | None:
    """Why an accelerator is not trusted; None when it computes what the CPU computes."""
    if isinstance(selftest, Unavailable):
        return f"the self-test failed: {selftest.reason}"
    faults = [str(fault) for fault in selftest.get("faults", ("no answer",))]
    if not faults:
        return None
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"it computes wrongly: {faults[0]}{more}; update driver and torch, then start again"


def installed_torch() -> str:
    """The version of torch that workers will load, without loading it."""
    from importlib.metadata import PackageNotFoundError, version  # costs 20 ms and is rarely asked

    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


@contextlib.asynccontextmanager
async def _child(
    command: Sequence[str], *, stderr: int = asyncio.subprocess.PIPE, variables: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child that does not outlive the block, whatever happens in it."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=scrubbed(os.environ, variables or {}),
        start_new_session=True,
        limit=_MAX_ANSWER,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # A child stuck in a driver cannot be waited for; the reaper gets it when the driver lets go.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.communicate(), 1.0)


def read_answer(out: bytes, err: bytes, code: int) -> Answer:
    """The last line of `out` as an object: libraries print on stdout too (amdsmi does)."""
    if code != 0:
        how = f"signal {-code} ({signal_name(-code)})" if code < 0 else f"exit {code}"
        lines = err.decode("utf-8", "replace").strip().splitlines()
        return Unavailable(reason=f"the probe ended with {how}" + (f": {lines[-1][:200]}" if lines else ""))
    lines_out = out.strip().splitlines()
    try:
        value = json.loads(lines_out[-1]) if lines_out else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else Unavailable(reason="the probe's answer is not JSON")
