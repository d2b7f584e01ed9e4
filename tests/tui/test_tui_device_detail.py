"""The detail of one device: every reading, who uses it, and the reason for what is missing."""

from __future__ import annotations

from typing import Any

from tui_fake import device, gpu

from distensor_tui.model import Snapshot
from distensor_tui.sections import apply
from distensor_tui.views.devices import detail

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
    return detail(snapshot.devices[0])


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
