"""RES-03 and RES-05: an unknown field never costs a device, and an error of NVML is never silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml

from distensor.core.control import DeviceKind
from distensor.core.reading import Unavailable
from distensor_server.devices.apple import apple_devices
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device, readings
from distensor_server.devices.nvidia import cuda_devices, cuda_failed, refreshed
from distensor_server.devices.nvml import has_hardware, probe_nvml

GIB = 1 << 30
MEMORY = HostMemory(total=128 * GIB, free=100 * GIB)
TORCH = {"version": "2.13.0", "cuda": True, "cuda_build": "13.0", "mps": False, "mps_build": False}
NOT_SUPPORTED = (3, "Not Supported")


def detect(nvml: FakeNvml, torch: Any = TORCH) -> tuple[Device, ...]:
    return cuda_devices(probe_nvml(nvml), torch, MEMORY)


def test_a_device_with_all_its_readings() -> None:
    (device,) = detect(FakeNvml())
    assert device == Device(
        device_id=device.device_id,
        kind=DeviceKind.CUDA,
        name="RTX 4090",
        slots=1,
        uuid="GPU-0",
        driver="550.54.14",
        runtime="CUDA 12.4",
        bus="00000000:01:00.0",
        cores=16384,
        utilization=0.94,
        memory_used=4 * GIB,
        memory_total=24 * GIB,
        temperature_c=72.0,
        temperature_limit_c=93.0,
        power_w=318.0,
        power_limit_w=450.0,
        energy_j=7200.0,
        fan=0.41,
        clock_mhz=2520.0,
        clock_limit_mhz=3105.0,
        memory_clock_mhz=10501.0,
        throttle=(),
        processes=(),
    )
    assert device.device_id == "GPU-0"
    info = device.info()
    assert (info.slots, info.memory_bytes, info.free_bytes, info.unusable) == (1, 24 * GIB, 20 * GIB, None)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"),
        ("nvmlDeviceGetTemperatureThreshold", "temperature_limit_c"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_j"),
        ("nvmlDeviceGetFanSpeed", "fan"),
        ("nvmlDeviceGetMaxClockInfo", "clock_limit_mhz"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle"),
        ("nvmlDeviceGetComputeRunningProcesses", "processes"),
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlSystemGetDriverVersion", "driver"),
        ("nvmlSystemGetCudaDriverVersion_v2", "runtime"),
        ("nvmlDeviceGetPciInfo", "bus"),
        ("nvmlDeviceGetNumGpuCores", "cores"),
    ],
)
def test_a_field_that_the_driver_lacks_is_not_available_with_its_reason(function: str, field: str) -> None:
    (device,) = detect(FakeNvml(errors={function: NOT_SUPPORTED}))
    assert device.unusable is None
    assert getattr(device, field) == Unavailable(reason="NVML: not supported")


def test_unified_memory_uses_the_memory_of_the_machine() -> None:
    (device,) = detect(FakeNvml(name=b"NVIDIA GB10", errors={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED}))
    assert (device.name, device.memory_total, device.memory_used) == ("NVIDIA GB10", 128 * GIB, 28 * GIB)
    assert device.unified_memory
    assert device.info().memory_bytes == 128 * GIB


def test_every_field_may_be_missing_at_once() -> None:
    asked = FakeNvml()
    detect(asked)
    unknown = {name for name in asked.calls if name not in ("nvmlInit", "nvmlShutdown") and "GetCount" not in name}
    (device,) = detect(FakeNvml(errors=dict.fromkeys(unknown - {"nvmlDeviceGetHandleByIndex"}, NOT_SUPPORTED)))
    assert {type(value) for name, value in readings(device).items() if not name.startswith("memory_")} <= {
        Unavailable,
        str,
    }
    assert (device.device_id, device.name, device.unusable) == ("cuda:0", "NVIDIA GPU 0", None)
    assert device.info().memory_bytes == 128 * GIB


@pytest.mark.parametrize(
    ("code", "text", "hint", "fault"),
    [
        (12, "NVML Shared Library Not Found", "no NVIDIA driver is installed", False),
        (9, "Driver Not Loaded", "modprobe nvidia", True),
        (18, "RM has detected an NVML/RM version mismatch.", "reboot", True),
        (999, "Unknown Error", "after suspend", True),
    ],
)
def test_an_error_of_nvml_is_shown_with_code_and_hint(code: int, text: str, hint: str, fault: bool) -> None:
    (device,) = detect(FakeNvml(errors={"nvmlInit": (code, text)}))
    assert (device.slots, device.fault) == (0, fault)
    assert device.unusable is not None
    assert f"NVML error {code}: {text}" in device.unusable
    assert hint in device.unusable
    assert device.info().unusable == device.unusable
    assert device.memory_total == Unavailable(reason="no device")


def test_one_lost_gpu_does_not_hide_the_other() -> None:
    class OneLost(FakeNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 1:
                raise self.NVMLError(15, "GPU is lost")
            return index

    good, bad = detect(OneLost(count=2))
    assert (good.device_id, good.unusable) == ("GPU-0", None)
    assert (bad.device_id, bad.fault) == ("cuda:1", True)
    assert "fallen off the bus" in (bad.unusable or "")


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ({**TORCH, "cuda": False, "cuda_build": None, "version": "2.13.0+cpu"}, "2.13.0+cpu is built without CUDA"),
        ({**TORCH, "cuda": False}, "cannot open CUDA"),
        (Unavailable(reason="no answer within 90 s"), "the torch probe failed: no answer within 90 s"),
        ({"error": {"code": 0, "message": "torch cannot be imported: x", "hint": ""}}, "torch cannot be imported: x"),
    ],
)
def test_a_gpu_that_torch_cannot_use_says_so(torch: Any, words: str) -> None:
    (device,) = detect(FakeNvml(), torch)
    assert words in (device.unusable or "")
    assert (device.info().slots, device.fault) == (0, True)


def test_a_probe_that_hangs_or_crashes_is_a_reason() -> None:
    (device,) = cuda_devices(Unavailable(reason="no answer within 10 s"), TORCH, MEMORY)
    assert device.unusable == "the NVML probe failed: no answer within 10 s"
    assert device.fault


def test_nvml_without_devices() -> None:
    (device,) = detect(FakeNvml(count=0))
    assert (device.unusable, device.fault) == ("NVML is there but lists no device", False)


def test_new_readings_replace_old_ones_and_keep_the_verdict() -> None:
    devices = detect(FakeNvml(), {**TORCH, "cuda": False})
    hot = FakeNvml()
    hot.nvmlDeviceGetTemperature = lambda _handle, _sensor: 90  # type: ignore[method-assign]
    (newer,) = refreshed(devices, probe_nvml(hot), MEMORY)
    assert newer.temperature_c == 90.0
    assert newer.unusable == devices[0].unusable


def test_when_nvml_stops_answering() -> None:
    assert cuda_failed(probe_nvml(FakeNvml())) is None
    assert "NVML error 999" in (cuda_failed(probe_nvml(FakeNvml(errors={"nvmlInit": (999, "Unknown Error")}))) or "")
    assert cuda_failed(Unavailable(reason="silent")) == "silent"
    (device,) = refreshed(detect(FakeNvml()), Unavailable(reason="silent"), MEMORY)
    assert (device.unusable, device.fault) == ("silent", True)
    assert device.utilization == device.processes == Unavailable(reason="silent"), "no reading of the past"


@pytest.mark.parametrize(
    ("torch", "mlx", "mps_reason", "mlx_reason"),
    [
        ({**TORCH, "mps": True, "mps_build": True}, {"metal": True}, None, "offered as mps"),
        ({**TORCH, "mps": False, "mps_build": True}, {"metal": False}, "cannot open MPS", "no Metal device"),
        ({**TORCH}, Unavailable(reason="the probe ended with signal 6 (SIGABRT)"), "without MPS", "signal 6 (SIGABRT)"),
    ],
)
def test_the_apple_gpu_says_how_it_can_be_used(torch: Any, mlx: Any, mps_reason: str | None, mlx_reason: str) -> None:
    mps, other = apple_devices(torch, mlx, {}, MEMORY)
    assert (mps.unusable is None) == (mps_reason is None)
    assert (mps_reason or "") in (mps.unusable or "")
    assert mlx_reason in (other.unusable or "")
    assert mps.info().memory_bytes == 128 * GIB


def test_free_memory_is_told_in_steps_so_that_heartbeats_stay_small() -> None:
    (device,) = detect(FakeNvml())
    from dataclasses import replace

    infos = {replace(device, memory_used=4 * GIB + noise).info() for noise in range(1, 200_000_000, 10_000_000)}
    assert len(infos) == 1


def test_a_machine_without_driver_and_without_card_has_nothing_to_explain() -> None:
    error = {"error": {"code": 12, "message": "NVML Shared Library Not Found", "hint": ""}}
    nothing = Unavailable(reason="not asked")
    assert cuda_devices({**error, "hardware": False}, nothing, MEMORY) == ()
    for hardware in (True, None):
        (device,) = cuda_devices({**error, "hardware": hardware}, nothing, MEMORY)
        assert "NVML error 12" in str(device.unusable)


def test_the_pci_bus_tells_whether_there_is_a_card(tmp_path: Path) -> None:
    assert has_hardware(tmp_path / "absent") is None
    assert has_hardware(tmp_path) is None
    for index, vendor in enumerate(("0x8086\n", "0x10de\n")):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "vendor").write_text(vendor)
        assert has_hardware(tmp_path) is (index == 1)
