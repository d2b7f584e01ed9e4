"""AMD GPUs from a recorded tree of sysfs: all readings, each missing file with its reason, never the wrong GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_tree import grow, recorded

from distensor.core.control import DeviceKind
from distensor.core.reading import Unavailable
from distensor_server.devices.amd import rocm_devices, rocm_refreshed, rocm_unknown
from distensor_server.devices.amdgpu import CLIENTS_EVERY, amd_session, has_amd, probe_amd
from distensor_server.devices.model import Device, foreign_processes

TORCH = {"version": "2.13.0+rocm6.4", "rocm": True, "rocm_build": "6.4"}
CUDA_TORCH = {"version": "2.13.0", "rocm": False, "rocm_build": None}
CARD = "sys/class/drm/card0/device/"
HWMON = CARD + "hwmon/hwmon4/"
VEGA = recorded("amdgpu_vega56.json")


def detect(root: Path, torch: Any = TORCH) -> tuple[Device, ...]:
    return rocm_devices(probe_amd(root), torch)


def tree(root: Path, **changes: str | None) -> Path:
    """The recorded card with some files changed or, by None, gone."""
    files = {**VEGA, **changes}
    return grow(root, {name: text for name, text in files.items() if text is not None})


def test_all_readings_of_a_recorded_card(tmp_path: Path) -> None:
    (device,) = detect(tree(tmp_path))
    assert (device.device_id, device.uuid, device.kind) == ("GPU-a32343daf897162a", device.device_id, DeviceKind.ROCM)
    assert (device.name, device.bus) == ("AMD GPU 1002:687F", "0000:08:00.0")
    assert (device.driver, device.runtime) == ("6.8.5", "ROCm 6.4.1-83")
    assert (device.utilization, device.memory_total, device.memory_used) == (0.11, 8176 << 20, 16224 << 10)
    assert (device.temperature_c, device.temperature_limit_c) == (39.0, 105.0), "the junction, not the edge"
    assert (device.power_w, device.power_limit_w, device.fan) == (9.103, 170.0, 0.2)
    assert (device.clock_mhz, device.clock_limit_mhz, device.memory_clock_mhz) == (351.59, 1590.0, 300.0)
    assert not isinstance(device.processes, Unavailable)
    assert [(p.pid, p.name, p.memory) for p in device.processes] == [(4242, "python", 1 << 30)]
    assert device.throttle == Unavailable(reason="sysfs does not tell")
    assert (device.unusable, device.info().slots) == (None, 1)


@pytest.mark.parametrize(
    ("file", "reading"),
    [
        (CARD + "gpu_busy_percent", "utilization"),
        (CARD + "mem_info_vram_total", "memory_total"),
        (CARD + "pp_dpm_sclk", "clock_limit_mhz"),
        (HWMON + "temp2_input", "temperature_c"),
        (HWMON + "power1_cap", "power_limit_w"),
        (HWMON + "pwm1", "fan"),
        (HWMON + "freq1_input", "clock_mhz"),
        ("opt/rocm/.info/version", "runtime"),
    ],
)
def test_a_file_that_a_card_lacks_costs_one_reading(tmp_path: Path, file: str, reading: str) -> None:
    (device,) = detect(tree(tmp_path, **{file: None}))
    found = getattr(device, reading)
    assert isinstance(found, Unavailable)
    assert len(found.reason) > 10
    assert device.unusable is None


def test_a_file_with_nonsense_is_a_reason(tmp_path: Path) -> None:
    (device,) = detect(tree(tmp_path, **{CARD + "gpu_busy_percent": "n/a"}))
    assert device.utilization == Unavailable(reason="gpu_busy_percent holds no number")


def test_newer_cards_tell_the_power_under_another_name(tmp_path: Path) -> None:
    (device,) = detect(tree(tmp_path, **{HWMON + "power1_average": None, HWMON + "power1_input": "21000000"}))
    assert device.power_w == 21.0


def test_a_sleeping_card_is_not_woken(tmp_path: Path) -> None:
    (device,) = detect(tree(tmp_path, **{CARD + "power/runtime_status": "suspended"}))
    assert device.temperature_c == Unavailable(reason="the GPU sleeps, and reading would wake it")
    assert device.memory_total == 8176 << 20
    assert device.unusable is None


def test_what_stands_between_the_card_and_its_work_is_named(tmp_path: Path) -> None:
    answer = probe_amd(tree(tmp_path))
    denied = rocm_devices({**answer, "kfd": "denied"}, TORCH)[0]
    assert "usermod -aG render,video" in (denied.unusable or "")
    missing = rocm_devices({**answer, "kfd": "missing"}, TORCH)[0]
    assert "/dev/kfd" in (missing.unusable or "")
    broken = rocm_devices(answer, {**TORCH, "rocm": False})[0]
    assert (broken.unusable, broken.fault) == ("torch 2.13.0+rocm6.4 cannot open ROCM here", True)


def test_a_card_that_nobody_meant_to_use_is_no_fault(tmp_path: Path) -> None:
    """Most Ryzens have one: a node with a CUDA build of torch is not degraded by it."""
    (device,) = detect(tree(tmp_path), CUDA_TORCH)
    assert "built without ROCM" in (device.unusable or "")
    assert (device.fault, device.info().slots) == (False, 0)


def test_cards_without_an_id_are_not_mixed_up(tmp_path: Path) -> None:
    second = {name.replace("card0", "card1"): text for name, text in VEGA.items() if name.startswith(CARD)}
    second[CARD.replace("card0", "card1") + "uevent"] = "DRIVER=amdgpu\nPCI_ID=1002:164E\nPCI_SLOT_NAME=0000:09:00.0"
    root = grow(tmp_path, {**VEGA, **second})
    for card in ("card0", "card1"):
        (root / CARD.replace("card0", card) / "unique_id").unlink()
    one, other = detect(root)
    assert {one.device_id, other.device_id} == {"rocm:0000:08:00.0", "rocm:0000:09:00.0"}
    assert "cannot be told from the other GPUs" in (one.unusable or "")
    (root / CARD.replace("card0", "card1") / "vendor").write_text("0x8086\n")
    (alone,) = detect(root)
    assert alone.unusable is None


def test_a_card_that_goes_keeps_its_place_and_comes_back(tmp_path: Path) -> None:
    root = tree(tmp_path)
    devices = detect(root)
    (root / CARD / "vendor").write_text("0x0000\n")
    (gone,) = rocm_refreshed(devices, probe_amd(root))
    assert (gone.fault, gone.unusable) == (True, "the kernel does not list it any more")
    assert isinstance(gone.temperature_c, Unavailable)
    (root / CARD / "vendor").write_text("0x1002\n")
    (back,) = rocm_refreshed((gone,), probe_amd(root))
    assert (back.unusable, back.fault, back.temperature_c) == (None, False, 39.0)
    (silent,) = rocm_refreshed(devices, Unavailable(reason="the rocm watcher ended"))
    assert silent.unusable == "the rocm watcher ended"


def test_other_cards_and_other_drivers_are_left_alone(tmp_path: Path) -> None:
    assert not has_amd(tmp_path)
    root = tree(tmp_path, **{CARD + "uevent": "DRIVER=vfio-pci\nPCI_SLOT_NAME=0000:08:00.0"})
    assert has_amd(root)
    assert detect(root) == (), "a card given to a virtual machine is not ours"
    assert not rocm_unknown((), probe_amd(root))


def test_a_probe_that_hangs_is_a_reason() -> None:
    (device,) = rocm_devices(Unavailable(reason="no answer within 10 s"), TORCH)
    assert (device.fault, device.unusable) == (True, "the AMD probe failed: no answer within 10 s")


def client(root: Path, pid: int, name: str, *descriptors: str, target: str = "/dev/dri/renderD128") -> None:
    """A process that has a GPU open; each descriptor's fdinfo is given."""
    folder = root / "proc" / str(pid)
    grow(folder, {"comm": name, **{f"fdinfo/{number}": text for number, text in enumerate(descriptors)}})
    (folder / "fd").mkdir()
    for number in range(len(descriptors)):
        (folder / "fd" / str(number)).symlink_to(target)


def fdinfo(identity: int, vram: str, bus: str = "0000:08:00.0") -> str:
    """As Documentation/gpu/drm-usage-stats.rst and the driver amdgpu have it."""
    head = f"pos:\t0\nflags:\t02100002\ndrm-driver:\tamdgpu\ndrm-client-id:\t{identity}\ndrm-pdev:\t{bus}\n"
    return f"{head}drm-memory-vram:\t{vram}\ndrm-engine-gfx:\t27892 ns"


def test_a_game_on_the_gpu_is_seen(tmp_path: Path) -> None:
    root = tree(tmp_path)
    client(root, 77, "game", fdinfo(9, "2048 KiB"), fdinfo(9, "2048 KiB"), fdinfo(10, "1 MiB"))
    client(root, 78, "other card", fdinfo(11, "5 MiB", bus="0000:09:00.0"))
    client(root, 79, "editor", fdinfo(12, "5 MiB"), target="/dev/null")
    client(root, 80, "odd", "no colon here\ndrm-pdev: 0000:08:00.0\ndrm-memory-vram: many KiB")
    (device,) = detect(root)
    assert not isinstance(device.processes, Unavailable)
    seen = [(process.pid, process.name, process.type, process.memory) for process in device.processes]
    assert seen == [
        (77, "game", "graphics", 3 << 20),
        (80, "odd", "graphics", 0),
        (4242, "python", "compute", 1 << 30),
    ]
    foreign = foreign_processes(device, {4242})
    assert not isinstance(foreign, Unavailable)
    assert [process.pid for process in foreign] == [77, 80]


def test_who_has_the_gpu_open_is_not_asked_every_time(tmp_path: Path) -> None:
    root = tree(tmp_path)
    sample = amd_session(root)
    assert [p["pid"] for p in sample()["devices"][0]["processes"]] == [4242]
    client(root, 77, "game", fdinfo(9, "1 MiB"))
    for _ in range(CLIENTS_EVERY - 1):
        assert [p["pid"] for p in sample()["devices"][0]["processes"]] == [4242]
    assert [p["pid"] for p in sample()["devices"][0]["processes"]] == [77, 4242]
