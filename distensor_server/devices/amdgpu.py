"""AMD GPUs through sysfs, as plain JSON values. Runs in the probe child only: a driver in trouble can hang a read.

Files: Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst of the Linux kernel (hwmon, gpu_busy_percent, mem_info_,
unique_id), and for processes the topology of amdkfd and fdinfo. A file that is missing or refuses is an
`{"unavailable": reason}`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from distensor_server.devices.amdlibrary import READINGS, Library
from distensor_server.devices.drmclients import Clients, drm_clients
from distensor_server.devices.nvml import process_name

Json: TypeAlias = dict[str, Any]

ROOT = Path("/")
VENDOR = "0x1002"
_CARD = re.compile(r"card\d+")
_ASLEEP = {"unavailable": "the GPU sleeps, and reading would wake it"}
_TEMPERATURES = ("junction", "edge")
"""Labels of hwmon temperatures, the one that limits the clock first."""


CLIENTS_EVERY = 5
"""So many samples (10 s) lie between two looks at who has the GPU open: each reads the names of all descriptors."""


def probe_amd(root: Path = ROOT) -> Json:
    """All GPUs that the kernel's driver amdgpu has taken, and whether ROCm programs may use them."""
    return amd_session(root)()


Open: TypeAlias = Callable[[], Library | Json]
"""Opens AMD's library, or says why it cannot be."""


def amd_session(root: Path = ROOT, open_it: Open | None = None) -> Callable[[], Json]:
    """What reads the GPUs again and again; with `open_it` also what only AMD's library tells."""
    count, clients = 0, Clients()
    library: Library | Json | None = None

    def more(device: Path, bus: str) -> Json:
        """The library opens every GPU, so it waits until none sleeps."""
        nonlocal library
        if open_it is None:
            return {}
        if library is None and not any(_asleep(gpu) for gpu in _gpus(root)):
            library = open_it()
        if library is None or _asleep(device):
            return dict.fromkeys(READINGS, _ASLEEP)
        return library.sample(bus) if isinstance(library, Library) else dict.fromkeys(READINGS, library)

    def sample() -> Json:
        nonlocal count, clients
        gpus = _gpus(root)
        if gpus and count % CLIENTS_EVERY == 0:
            clients = drm_clients(root)
        count += 1
        return {
            "kfd": _kfd(root / "dev/kfd"),
            "rocm": _text(root / "opt/rocm/.info/version") or {"unavailable": "no /opt/rocm (torch brings its own)"},
            "devices": [one(index, device) for index, device in enumerate(gpus)],
        }

    def one(index: int, device: Path) -> Json:
        found = _device(device, root, clients)
        return {"index": index, **found, **more(device, found["bus"])}

    return sample


def has_amd(root: Path = ROOT) -> bool:
    """Whether it is worth while to ask. Vendor numbers are the kernel's own and wake nothing."""
    return bool(_gpus(root))


def _gpus(root: Path) -> list[Path]:
    cards = [c / "device" for c in sorted((root / "sys/class/drm").glob("card*")) if _CARD.fullmatch(c.name)]
    return [device for device in cards if _text(device / "vendor") == VENDOR]


def _kfd(file: Path) -> str:
    if not file.exists():
        return "missing"
    return "ok" if os.access(file, os.R_OK | os.W_OK) else "denied"


def _device(device: Path, root: Path, clients: Clients) -> Json:
    facts = dict(_pairs(device / "uevent"))
    unique = _text(device / "unique_id")
    identity: Json = {
        "unique_id": unique or {"unavailable": "the driver gives this GPU no unique_id"},
        "name": _text(device / "product_name") or f"AMD GPU {facts.get('PCI_ID', '')}".strip(),
        "bus": facts.get("PCI_SLOT_NAME", ""),
        "module": facts.get("DRIVER", "none"),
        "driver": _text(root / "sys/module/amdgpu/version") or _text(root / "proc/sys/kernel/osrelease"),
        "memory_total": _number(device / "mem_info_vram_total"),
        "memory_used": _number(device / "mem_info_vram_used"),
        "processes": _processes(root, unique, clients.get(facts.get("PCI_SLOT_NAME", ""), {})),
    }
    if _asleep(device):
        return {**identity, **dict.fromkeys(("utilization", "temperature_c", "power_w", "clock_mhz"), _ASLEEP)}
    return {**identity, "utilization": _number(device / "gpu_busy_percent", 100), **_sensors(device)}


def _asleep(device: Path) -> bool:
    return _text(device / "power/runtime_status") == "suspended"


def _sensors(device: Path) -> Json:
    hwmon = next(iter(sorted(device.glob("hwmon/hwmon*"))), device / "hwmon")
    heat = _temperature_input(hwmon)
    average, now = _number(hwmon / "power1_average", 1e6), _number(hwmon / "power1_input", 1e6)
    return {
        "temperature_c": _number(hwmon / f"{heat}_input", 1000),
        "temperature_limit_c": _number(hwmon / f"{heat}_crit", 1000),
        "power_w": now if isinstance(average, dict) else average,
        "power_limit_w": _number(hwmon / "power1_cap", 1e6),
        "fan": _share(_number(hwmon / "pwm1"), _number(hwmon / "pwm1_max")),
        "clock_mhz": _number(hwmon / "freq1_input", 1e6),
        "clock_limit_mhz": _highest_level(device / "pp_dpm_sclk"),
        "memory_clock_mhz": _number(hwmon / "freq2_input", 1e6),
    }


def _temperature_input(hwmon: Path) -> str:
    labels = {_text(file): file.name.removesuffix("_label") for file in sorted(hwmon.glob("temp*_label"))}
    return next((labels[label] for label in _TEMPERATURES if label in labels), "temp1")


def _highest_level(file: Path) -> Any:
    """The last of the lines '7: 1590Mhz *'."""
    levels = [int(found) for found in re.findall(r"^\d+:\s*(\d+)\s*mhz", _text(file), re.MULTILINE | re.IGNORECASE)]
    return float(max(levels)) if levels else {"unavailable": "the driver lists no clock levels"}


def _processes(root: Path, unique: str, clients: Mapping[int, int]) -> Any:
    """Those that amdkfd knows compute; others that have the GPU open draw."""
    computing = _computing(root / "sys/class/kfd/kfd", unique)
    if computing is None and not clients:
        return {"unavailable": "amdkfd does not list this GPU"}
    found = {pid: ("graphics", memory) for pid, memory in clients.items()}
    found |= {pid: ("compute", memory) for pid, memory in (computing or {}).items()}
    return [
        {"pid": pid, "name": process_name(pid, root / "proc"), "type": kind, "memory": memory}
        for pid, (kind, memory) in sorted(found.items())
    ]


def _computing(kfd: Path, unique: str) -> dict[int, int] | None:
    gpu = _kfd_id(kfd, unique)
    if gpu is None:
        return None
    amounts = {folder.name: _number(folder / f"vram_{gpu}") for folder in kfd.glob("proc/[0-9]*")}
    return {int(pid): memory for pid, memory in amounts.items() if isinstance(memory, int)}


def _kfd_id(kfd: Path, unique: str) -> str | None:
    """amdkfd writes the same number in decimal."""
    if not re.fullmatch(r"[0-9a-fA-F]+", unique):
        return None
    wanted = str(int(unique, 16))
    for node in sorted(kfd.glob("topology/nodes/*")):
        if dict(line.split(None, 1) for line in _lines(node / "properties") if " " in line).get("unique_id") == wanted:
            return _text(node / "gpu_id")
    return None


def _pairs(file: Path) -> Iterator[tuple[str, str]]:
    for line in _lines(file):
        name, equals, value = line.partition("=")
        if equals:
            yield name, value


def _lines(file: Path) -> list[str]:
    return _text(file).splitlines()


def _share(value: Any, greatest: Any) -> Any:
    if isinstance(value, dict):
        return value
    return value / (255 if isinstance(greatest, dict) or not greatest else greatest)


def _number(file: Path, divisor: float = 1) -> Any:
    """The number in a file; an integer when nothing is divided."""
    try:
        value = int(file.read_text())
    except OSError as error:
        return {"unavailable": f"{file.name}: {(error.strerror or 'cannot be read').lower()}"}
    except ValueError:
        return {"unavailable": f"{file.name} holds no number"}
    return value if divisor == 1 else value / divisor


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
