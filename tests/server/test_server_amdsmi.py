"""AMD's library behind its seam, with answers in the shape that its documentation and its users' reports show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_server_amd import CARD, TORCH, tree

from distensor.core.reading import Unavailable
from distensor_server.devices import amdlibrary, probe
from distensor_server.devices.amd import rocm_devices
from distensor_server.devices.amdgpu import amd_session
from distensor_server.devices.amdlibrary import NOT_INSTALLED, Library, open_library, trial

BUS = "0000:08:00.0"
MI300 = {
    "reference_timestamp": 1, "acc_ppt_pwr": 10, "per_ppt_pwr": 20, "active_prochot_thrm": False,
    "active_ppt_pwr": True, "active_socket_thrm": True, "active_vr_thrm": False, "active_hbm_thrm": "N/A",
}  # fmt: skip
OLDER = dict.fromkeys(MI300, "N/A")


class AmdSmiLibraryError(Exception):
    """As `AmdSmiLibraryException`: its text has several lines."""


def module(**answers: Any) -> Any:
    """The module; an answer that is an exception is raised."""

    def answering(name: str, default: Any) -> Any:
        def call(*_given: Any) -> Any:
            found = answers.get(name, default)
            if isinstance(found, Exception):
                raise found
            return found

        return call

    defaults: dict[str, Any] = {
        "init": None,
        "get_processor_handles": ["handle-1"],
        "get_gpu_device_bdf": "0000:08:00.0",
        "get_energy_count": {"energy_accumulator": 1_000_000, "counter_resolution": 15.3, "timestamp": 1},
        "get_violation_status": MI300,
        "get_gpu_metrics_info": {"indep_throttle_status": 0},
    }
    return SimpleNamespace(**{f"amdsmi_{name}": answering(name, value) for name, value in defaults.items()})


def test_energy_and_what_holds_a_gpu_back() -> None:
    found = Library(module()).sample(BUS)
    assert found["energy_j"] == pytest.approx(15.3)
    assert found["throttle"] == ["power limit", "heat"]


def test_an_older_name_of_the_counter() -> None:
    counted = {"power": 2_000_000, "counter_resolution": 1.0, "timestamp": 1}
    assert Library(module(get_energy_count=counted)).sample(BUS)["energy_j"] == 2.0


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, []),
        (1 << 3, ["power limit"]),
        ((1 << 17) | (1 << 36), ["current limit", "heat"]),
        (1 << 57, ["another reason of the firmware"]),
        ("N/A", {"unavailable": "amdsmi: this GPU does not tell what holds it back"}),
    ],
)
@pytest.mark.parametrize("violations", [OLDER, AmdSmiLibraryError("NOT_SUPPORTED")])
def test_gpus_before_mi300_tell_it_in_bits(violations: Any, bits: Any, words: Any) -> None:
    library = Library(module(get_violation_status=violations, get_gpu_metrics_info={"indep_throttle_status": bits}))
    assert library.sample(BUS)["throttle"] == words


def test_a_module_before_violations_were_told() -> None:
    old = module(get_gpu_metrics_info={"indep_throttle_status": 1 << 33})
    del old.amdsmi_get_violation_status
    assert Library(old).sample(BUS)["throttle"] == ["heat"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            AmdSmiLibraryError("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED"),
            "Error code: 2 | AMDSMI_STATUS_NOT_SUPPORTED",
        ),
        (KeyError(), "KeyError"),
        ({"energy_accumulator": "N/A", "counter_resolution": 15.3}, "this GPU does not count its energy"),
        ({}, "this GPU does not count its energy"),
    ],
)
def test_one_answer_that_fails_costs_one_reading(answer: Any, reason: str) -> None:
    found = Library(module(get_energy_count=answer)).sample(BUS)
    assert found["energy_j"] == {"unavailable": f"amdsmi: {reason}"}
    assert found["throttle"] == ["power limit", "heat"]


def test_a_gpu_that_it_does_not_list_has_a_reason() -> None:
    assert Library(module()).sample("0000:99:00.0")["energy_j"] == {"unavailable": "amdsmi does not list 0000:99:00.0"}


def test_what_it_prints_does_not_reach_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = module()
    noisy.amdsmi_init = lambda: print("Unable to find libamd_smi.so library")
    Library(noisy).sample(BUS)
    assert capsys.readouterr().out == ""


# with sysfs


def session(root: Path, library: Any) -> Any:
    opened = []

    def open_it() -> Any:
        opened.append(1)
        return library

    return amd_session(root, open_it), opened


def test_its_readings_stand_beside_those_of_sysfs(tmp_path: Path) -> None:
    sample, opened = session(tree(tmp_path), Library(module()))
    for _ in range(2):
        (device,) = rocm_devices(sample(), TORCH)
        assert device.energy_j == pytest.approx(15.3)
        assert device.throttle == ("power limit", "heat")
        assert device.temperature_c == 39.0, "that is sysfs"
    assert opened == [1], "opened once"


def test_without_it_the_reason_says_how_to_get_it(tmp_path: Path) -> None:
    sample, _ = session(tree(tmp_path), open_library(find=lambda _name: None))
    (device,) = rocm_devices(sample(), TORCH)
    assert device.energy_j == Unavailable(reason=NOT_INSTALLED)
    assert device.throttle == Unavailable(reason=NOT_INSTALLED)


def test_a_sleeping_gpu_is_not_woken_by_it(tmp_path: Path) -> None:
    root = tree(tmp_path, **{CARD + "power/runtime_status": "suspended"})
    sample, opened = session(root, Library(module()))
    (device,) = rocm_devices(sample(), TORCH)
    assert device.energy_j == Unavailable(reason="the GPU sleeps, and reading would wake it")
    assert opened == []
    (root / CARD / "power/runtime_status").write_text("active\n")
    (device,) = rocm_devices(sample(), TORCH)
    assert opened == [1]
    assert not isinstance(device.energy_j, Unavailable)


# its start is tried in a child


def ended(code: int, stderr: bytes = b"") -> Any:
    return lambda command, **_more: subprocess.CompletedProcess(command, code, b"", stderr)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (ended(0), ""),
        (ended(-11), "amdsmi failed (exit -11)"),
        (ended(1, b"Traceback\nKeyError: 'libamd_smi.so'\n"), "amdsmi failed (exit 1): KeyError: 'libamd_smi.so'"),
    ],
)
def test_a_crash_is_the_childs(run: Any, reason: str) -> None:
    assert trial(run) == reason


def test_one_that_hangs_or_cannot_be_started_is_left_alone() -> None:
    def hang(command: Any, **more: Any) -> Any:
        raise subprocess.TimeoutExpired(command, more["timeout"])

    def refuse(*_given: Any, **_more: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    assert trial(hang) == "amdsmi gave no answer within 5 s"
    assert trial(refuse) == "amdsmi could not be tried: Resource temporarily unavailable"
    assert open_library(find=lambda _name: 1, run=hang) == {"unavailable": "amdsmi gave no answer within 5 s"}


def test_the_probe_reads_everything_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", module())
    assert probe.main(["amdsmi"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][BUS]["throttle"] == ["power limit", "heat"]
    found = open_library(find=lambda _name: 1, run=ended(0))
    assert isinstance(found, Library)
    assert found.buses == [BUS]


def test_the_real_child_says_that_the_module_is_missing() -> None:
    assert amdlibrary.trial().startswith("amdsmi failed (exit 1): ModuleNotFoundError")
