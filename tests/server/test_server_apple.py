"""The GPU of a Mac from recorded answers of its programs; no Mac has run this yet."""

from __future__ import annotations

import plistlib
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_tree import recorded

from distensor.core.reading import Unavailable
from distensor_server.devices.apple import apple_devices, apple_refreshed
from distensor_server.devices.host import HostMemory
from distensor_server.devices.macos import ACCELERATOR, CHIP, HEAT, PLATFORM, POWER, SYSTEM, apple_session
from distensor_server.devices.model import Device

GIB = 1 << 30
MEMORY = HostMemory(total=64 * GIB, free=50 * GIB)
TORCH = {"version": "2.13.0", "mps": True, "mps_build": True, "mps_memory": 48 * GIB}
MLX = {"metal": True}
REGISTRY: dict[str, Any] = dict(recorded("ioreg_m4_max.json"))


class Programs:
    """Answers of the system's programs by command; an exception is raised."""

    def __init__(self, **changes: Any) -> None:
        self.calls: list[Sequence[str]] = []
        self.answers: dict[Sequence[str], Any] = {
            ACCELERATOR: plistlib.dumps(REGISTRY["IOAccelerator"]),
            PLATFORM: plistlib.dumps(REGISTRY["IOPlatformExpertDevice"]),
            CHIP: b"Apple M4 Max\n",
            SYSTEM: b"15.1\n",
            HEAT: b"Note: No thermal warning level has been recorded\n",
            POWER: b"**** GPU usage ****\n\nGPU HW active frequency: 389 MHz\nGPU Power: 33 mW\n",
            **{globals()[name]: value for name, value in changes.items()},
        }

    def __call__(self, command: Sequence[str]) -> bytes:
        self.calls.append(command)
        answer = self.answers[command]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, bytes)
        return answer


def detect(programs: Programs, *, is_root: bool = False, memory: HostMemory = MEMORY) -> Device:
    mps, mlx = apple_devices(TORCH, MLX, apple_session(programs, is_root=is_root)(), memory)
    assert mlx.device_id == "mlx"
    return mps


def test_all_readings_of_a_recorded_mac() -> None:
    device = detect(Programs())
    assert (device.name, device.driver, device.cores) == ("Apple M4 Max GPU (MPS)", "macOS 15.1", 40)
    assert (device.utilization, device.throttle) == (0.16, ())
    assert device.unified_memory
    assert device.memory_total == 48 * GIB, "Metal's working set, not all of the memory"
    assert device.memory_used == 2363801600
    assert device.power_w == Unavailable(reason="powermetrics tells the power to root only")
    assert device.temperature_c == Unavailable(reason="macOS does not tell")
    assert isinstance(device.uuid, str)
    assert device.uuid.startswith("MPS-")
    assert "0000" not in device.uuid, "the platform's own id is not shown"


def test_no_more_is_free_than_the_machine_has() -> None:
    device = detect(Programs(), memory=HostMemory(total=64 * GIB, free=8 * GIB))
    assert device.memory_used == 40 * GIB


def test_root_may_read_the_power() -> None:
    assert detect(Programs(), is_root=True).power_w == 0.033
    odd = detect(Programs(POWER=b"nothing of use"), is_root=True).power_w
    assert odd == Unavailable(reason="powermetrics does not tell the GPU's power")


def test_heat_that_slows_the_machine_is_said() -> None:
    assert detect(Programs(HEAT=b"CPU_Speed_Limit \t= 72\n")).throttle == ("heat: the system runs at 72 %",)


FAILURES: list[Callable[[Sequence[str]], Any]] = [
    lambda command: FileNotFoundError(2, "No such file or directory"),
    lambda command: subprocess.CalledProcessError(1, command),
    lambda command: subprocess.TimeoutExpired(command, 5),
    lambda command: b"not a property list",
    lambda command: plistlib.dumps([{"IOClass": "other"}]),
    lambda command: plistlib.dumps({"not": "a list"}),
]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_program_that_fails_costs_its_readings_and_not_the_gpu(failure: Callable[[Sequence[str]], Any]) -> None:
    device = detect(Programs(ACCELERATOR=failure(ACCELERATOR), PLATFORM=failure(PLATFORM)))
    assert device.unusable is None
    for reading in (device.utilization, device.cores, device.uuid):
        assert isinstance(reading, Unavailable)
        assert reading.reason.startswith("ioreg")
    assert device.memory_used == 0


def test_what_cannot_change_is_asked_once() -> None:
    programs = Programs()
    session = apple_session(programs, is_root=False)
    assert session() == session()
    assert programs.calls.count(ACCELERATOR) == 2
    assert programs.calls.count(PLATFORM) == programs.calls.count(CHIP) == 1


def test_new_readings_come_and_a_silent_watcher_does_not_cost_the_gpu() -> None:
    devices = apple_devices(TORCH, MLX, apple_session(Programs(), is_root=False)(), MEMORY)
    busy = {**REGISTRY["IOAccelerator"][0], "PerformanceStatistics": {"Device Utilization %": 97}}
    fresh = apple_session(Programs(ACCELERATOR=plistlib.dumps([busy])), is_root=False)()
    mps, mlx = apple_refreshed(devices, fresh, MEMORY)
    assert (mps.utilization, mlx) == (0.97, devices[1])
    quiet, _ = apple_refreshed(devices, Unavailable(reason="the apple watcher ended"), MEMORY)
    assert quiet.unusable is None
    assert quiet.utilization == Unavailable(reason="the apple watcher ended")
