"""Sensors of the CPU in trees of files as Linux shows them: Intel, AMD, ARM boards, virtual machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_tree import grow
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.reading import Unavailable
from distensor_server.devices.cgroup import CgroupLimits
from distensor_server.devices.host import Host, cpu_device
from distensor_server.devices.processor import CpuSensors, cpu_uuid

INTEL = {
    "class/hwmon/hwmon0/name": "acpitz",
    "class/hwmon/hwmon0/temp1_input": 27800,
    "class/hwmon/hwmon2/name": "coretemp",
    "class/hwmon/hwmon2/temp1_input": 61000,
    "class/hwmon/hwmon2/temp1_crit": 100000,
    "class/hwmon/hwmon2/temp2_input": 67000,
    "class/powercap/intel-rapl:0/name": "package-0",
    "class/powercap/intel-rapl:0/energy_uj": 262_000_000_000,
    "class/powercap/intel-rapl:0/max_energy_range_uj": 262_143_328_850,
    "class/powercap/intel-rapl:0/constraint_0_power_limit_uw": 125_000_000,
    "class/powercap/intel-rapl:1/name": "psys",
    "devices/system/cpu/cpufreq/policy0/scaling_cur_freq": 800_000,
    "devices/system/cpu/cpufreq/policy1/scaling_cur_freq": 4_700_000,
    "devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq": 5_000_000,
    "devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": 0,
}


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def set_file(root: Path, name: str, value: int) -> None:
    (root / name).write_text(f"{value}\n")


def test_an_intel_machine(tmp_path: Path) -> None:
    time = Time()
    sensors = CpuSensors(grow(tmp_path, INTEL), time)
    first = sensors.read()
    assert (first["temperature_c"], first["temperature_limit_c"]) == (67.0, 100.0)
    assert (first["clock_mhz"], first["clock_limit_mhz"], first["power_limit_w"]) == (4700.0, 5000.0, 125.0)
    assert (first["energy_j"], first["throttle"]) == (0.0, ())
    assert isinstance(first["power_w"], Unavailable)
    time.now += 2
    set_file(tmp_path, "class/powercap/intel-rapl:0/energy_uj", 262_000_000_000 + 90_000_000)
    set_file(tmp_path, "devices/system/cpu/cpu0/thermal_throttle/package_throttle_count", 1)
    second = sensors.read()
    assert (second["power_w"], second["energy_j"], second["throttle"]) == (45.0, 90.0, ("heat",))
    assert sensors.read()["throttle"] == ()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40_000_000), min_size=1, max_size=12))
def test_energy_never_goes_back_when_the_counter_wraps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    root, time, most = tmp_path_factory.mktemp("sys"), Time(), 100_000_000
    name = "class/powercap/intel-rapl:0/"
    grow(root, {name + "name": "package-0", name + "energy_uj": 0, name + "max_energy_range_uj": most})
    sensors = CpuSensors(root, time)
    sensors.read()
    total = 0
    for step in steps:
        time.now += 1
        total += step
        set_file(root, name + "energy_uj", total % most)
        read = sensors.read()
        assert read["energy_j"] == pytest.approx(total / 1e6)
        assert read["power_w"] == pytest.approx(step / 1e6)


def test_energy_that_only_root_may_read_says_so(tmp_path: Path) -> None:
    name = "class/powercap/intel-rapl:0/"
    read = CpuSensors(grow(tmp_path, {name + "name": "package-0"}), Time()).read()
    assert "only root" in str(read["power_w"])
    assert "only root" in str(read["energy_j"])


@pytest.mark.parametrize(
    ("files", "degrees"),
    [
        ({"class/hwmon/hwmon1/name": "k10temp", "class/hwmon/hwmon1/temp1_input": 71250}, 71.25),
        ({"class/thermal/thermal_zone0/type": "cpu-thermal", "class/thermal/thermal_zone0/temp": 52000}, 52.0),
        ({"class/hwmon/hwmon1/name": "coretemp", "class/hwmon/hwmon1/temp1_input": -128000}, None),
        ({"class/hwmon/hwmon1/name": "nvme", "class/hwmon/hwmon1/temp1_input": 40000}, None),
        ({}, None),
    ],
)
def test_heat_of_other_machines(tmp_path: Path, files: dict[str, str | int], degrees: float | None) -> None:
    read = CpuSensors(grow(tmp_path, files), Time()).read()["temperature_c"]
    assert read == degrees if degrees is not None else isinstance(read, Unavailable)


def test_a_sensor_that_goes_away_costs_only_itself(tmp_path: Path) -> None:
    sensors = CpuSensors(grow(tmp_path, INTEL), Time())
    (tmp_path / "class/hwmon/hwmon2/temp1_input").unlink()
    (tmp_path / "class/hwmon/hwmon2/temp2_input").unlink()
    read = sensors.read()
    assert isinstance(read["temperature_c"], Unavailable)
    assert read["clock_mhz"] == 4700.0


def test_the_name_of_the_cpu_stays_and_does_not_show_the_machine_id(tmp_path: Path) -> None:
    file = grow(tmp_path, {"machine-id": "8e2b7d0a6f0b4c2f9d3c0a1b2c3d4e5f"}) / "machine-id"
    assert cpu_uuid(file) == cpu_uuid(file)
    assert isinstance(cpu_uuid(file), str)
    assert "8e2b" not in str(cpu_uuid(file))
    assert isinstance(cpu_uuid(tmp_path / "absent"), Unavailable)


def test_the_cpu_is_a_device_like_the_others() -> None:
    host = Host(limits=lambda: CgroupLimits(cpus=1.5), sensors=lambda: {"temperature_c": 61.0, "power_w": 45.0})
    device = cpu_device(host.sample(), slots=1, name="CPU")
    assert (device.temperature_c, device.power_w) == (61.0, 45.0)
    assert isinstance(device.fan, Unavailable)
    assert device.unified_memory
    assert "threads" in str(device.runtime)
