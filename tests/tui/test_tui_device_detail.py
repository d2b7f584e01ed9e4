"""The detail of one device: every reading, who uses it, and the reason for what is missing."""

from __future__ import annotations

from typing import Any

from tui_fake import device, gpu

from distensor_tui import plain
from distensor_tui.commands.devices import chosen
from distensor_tui.devicefacts import facts as device_facts
from distensor_tui.model import Snapshot
from distensor_tui.sections import apply

NOW = 1_700_000_000.0
FULL: dict[str, Any] = {
    "uuid": "GPU-4b2c1a9f",
    "driver": "550.54.14",
    "cores": 16384,
    "temperature_limit_c": 93,
    "energy_j": 7.2e6,
    "fan": 0.41,
    "clock_mhz": 2520,
    "clock_limit_mhz": 3105,
    "memory_clock_mhz": 10501,
    "throttle": ["power limit", "heat"],
    "processes": [
        {"pid": 7, "name": "python", "type": "compute", "memory": 1 << 30, "utilization": 0.9, "owner": "own"},
        {"pid": 8, "name": "[red]game", "type": "graphics", "memory": None, "utilization": None, "owner": "foreign"},
        {"pid": 9, "name": None, "type": "compute", "memory": None, "owner": "unknown"},
    ],
}


def facts(raw: dict[str, Any]) -> list[tuple[str, str]]:
    snapshot = apply(Snapshot(), {"devices": [raw]}, full=True)
    assert snapshot.problems == ()
    assert snapshot.devices is not None
    return device_facts(snapshot.devices[0], NOW)


def test_all_readings_of_a_gpu() -> None:
    shown = facts(gpu(**FULL))
    words = dict(shown)
    assert words["uuid"] == "GPU-4b2c1a9f"
    assert words["cores"] == "16,384"
    assert words["temperature"] == "72 C (slows down at 93 C)"
    assert words["power"] == "318 W (limit 450 W)"
    assert words["clock"] == "2520 MHz (at most 3105 MHz)"
    assert words["energy"] == "2.00 kWh since the driver was loaded"
    assert words["held back by"] == "power limit, heat"
    assert [value for name, value in shown if name == "process"] == [
        "7 python  own  compute  1.0 GiB  90%",
        "8 [red]game  foreign  graphics",
        "9 ?  unknown  compute",
    ]


def test_what_is_missing_says_why() -> None:
    words = dict(facts(device(unified_memory=True, unavailable={"power_w": "no sensor", "processes": "not read"})))
    assert words["memory"].endswith("(the machine's own)")
    assert words["power"] == "not available: no sensor"
    assert words["processes"] == "not available: not read"
    assert "process" not in words


def test_a_part_of_a_gpu_names_the_whole() -> None:
    words = dict(facts(gpu(parent="GPU-0", profile="1g.10gb", processes=[], throttle=[])))
    assert words["part of"] == "GPU-0, profile 1g.10gb"
    assert (words["process"], words["held back by"]) == ("none", "nothing")


def test_a_supervisor_that_tells_less_is_fine() -> None:
    words = dict(facts(gpu()))
    assert "process" not in words
    assert "held back by" not in words
    assert words["temperature"] == "72 C"


BENCHMARK: dict[str, Any] = {
    "at": NOW - 7200,
    "stale": False,
    "matmul_f32_p10": 4.1e13,
    "matmul_f32_p50": 4.4e13,
    "matmul_bf16_p10": {"unavailable": "the backend lacks it"},
    "matmul_bf16_p50": {"unavailable": "the backend lacks it"},
    "memory_p10": 8.1e11,
    "memory_p50": 9.2e11,
    "disk_write": 5.5e8,
    "disk_read": {"unavailable": "/x: less than 1 GiB is free"},
}


def test_what_was_measured_has_its_age_and_its_reasons() -> None:
    words = dict(facts(gpu(benchmark=BENCHMARK)))
    assert words["measured"] == "2 h 00 min ago"
    assert words["float32"] == "44 TFLOP/s (at least 41 TFLOP/s in 9 of 10 runs)"
    assert words["bfloat16"] == "not available: the backend lacks it"
    assert words["memory rate"] == "920 GB/s (at least 810 GB/s in 9 of 10 runs)"
    assert (words["disk write"], words["disk read"][:13]) == ("550 MB/s", "not available")
    stale = dict(facts(gpu(benchmark={**BENCHMARK, "stale": True})))
    assert "have changed since" in stale["measured"]
    assert dict(facts(gpu()))["measured"].startswith("not yet")
    assert "measured" not in dict(facts(gpu(usable=False, reason="x")))


def test_a_device_is_found_by_the_beginning_of_its_id() -> None:
    snapshot = apply(Snapshot(), {"devices": [gpu(id="GPU-4b2c"), gpu(id="GPU-4b9d"), device()]}, full=True)
    devices = snapshot.devices or ()
    assert [d.id for d in chosen(devices, None)] == ["GPU-4b2c", "GPU-4b9d", "cpu"]
    assert [d.id for d in chosen(devices, "cpu")] == ["cpu"]
    assert [d.id for d in chosen(devices, "GPU-4b2")] == ["GPU-4b2c"]
    assert chosen(devices, "GPU-4b") == [], "two begin so"
    assert chosen(devices, "GP") == []


def test_one_line_of_a_device_says_what_slows_it() -> None:
    snapshot = apply(Snapshot(), {"devices": [gpu(throttle=["heat"])]}, full=True)
    assert plain.devices(snapshot, NOW).endswith("72 C  318 W  slowed by heat")
