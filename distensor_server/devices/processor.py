"""Sensors of the CPU under /sys: heat, power, clock, and whether the hardware slows it down. Linux; elsewhere a reason.

Layouts: Documentation/hwmon/{coretemp,k10temp}.rst, Documentation/power/powercap/powercap.rst and
Documentation/admin-guide/pm/cpufreq.rst of the Linux kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distensor.core.reading import Reading, Unavailable

SYS = Path("/sys")
MACHINE_ID = Path("/etc/machine-id")
CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")
"""Names of the hwmon drivers that read a CPU, best first."""
ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc-thermal")
ABSURD_C = 200.0
"""Broken sensors say -128, 0 or 255."""
FEW = 8
"""So many cores are asked for their clock: each question may wake one."""

_NO_SENSOR = Unavailable(reason="this machine has no such sensor under /sys (virtual machines have none)")
_FIRST_LOOK = Unavailable(reason="measured from the next reading on")


class CpuSensors:
    """Finds the files once and reads them at each `read`."""

    def __init__(self, sys: Path, monotonic: Callable[[], float]) -> None:
        self._sys = sys
        self._monotonic = monotonic
        self._heat = _heat_files(sys)
        self._rapl = [p for p in sorted(sys.glob("class/powercap/intel-rapl:*")) if _text(p / "name")[:7] == "package"]
        self._policies = sorted(sys.glob("devices/system/cpu/cpufreq/policy*"))[:FEW]
        self._last_energy: dict[Path, int] = {}
        self._total_uj = 0
        self._last_at = 0.0
        self._throttled: int | None = None

    def read(self) -> Mapping[str, Reading[Any]]:
        """Readings of `Device` by name."""
        energy, power = self._power()
        inputs = [path for path in self._heat if path.name.endswith("_input")]
        limits = [_number(path.with_name(path.name.replace("_input", "_crit"))) for path in inputs]
        return {
            "temperature_c": _hottest(self._heat),
            "temperature_limit_c": min((v / 1000 for v in limits if v and 0 < v < ABSURD_C * 1000), default=_NO_SENSOR),
            "power_w": power,
            "power_limit_w": _sum(path / "constraint_0_power_limit_uw" for path in self._rapl),
            "energy_j": energy,
            "clock_mhz": _fastest(path / "scaling_cur_freq" for path in self._policies),
            "clock_limit_mhz": _fastest(path / "cpuinfo_max_freq" for path in self._policies),
            "throttle": self._throttle(),
        }

    def _power(self) -> tuple[Reading[float], Reading[float]]:
        """Joules since the start, and watts since the last reading; the counters wrap around."""
        if not self._rapl:
            return _NO_SENSOR, _NO_SENSOR
        counted = {path: _number(path / "energy_uj") for path in self._rapl}
        known = {path: value for path, value in counted.items() if value is not None}
        if len(known) < len(counted):
            why = Unavailable(reason="only root may read the energy counters of this CPU (RAPL)")
            return why, why
        now = self._monotonic()
        seconds, first = now - self._last_at, not self._last_energy
        spent = sum(self._spent(path, value) for path, value in known.items())
        self._last_energy, self._last_at = known, now
        if first:
            return 0.0, _FIRST_LOOK
        self._total_uj += spent
        return self._total_uj / 1e6, spent / 1e6 / seconds if seconds > 0 else _FIRST_LOOK

    def _spent(self, path: Path, value: int) -> int:
        before = self._last_energy.get(path, value)
        return value - before if value >= before else value - before + (_number(path / "max_energy_range_uj") or before)

    def _throttle(self) -> Reading[tuple[str, ...]]:
        """Whether Intel's counters of thermal events have grown since the last reading."""
        files = self._sys.glob("devices/system/cpu/cpu0/thermal_throttle/package_throttle_count")
        count = next((_number(file) for file in files), None)
        if count is None:
            return Unavailable(reason="this CPU does not count thermal events")
        before, self._throttled = self._throttled, count
        return ("heat",) if before is not None and count > before else ()


def cpu_uuid(file: Path = MACHINE_ID) -> Reading[str]:
    """The same after a reboot; made from the machine id, which by machine-id(5) must not be shown itself."""
    machine = _text(file)
    if not machine:
        return Unavailable(reason=f"{file} is empty or missing")
    return f"CPU-{machine_uuid(machine)}"


def machine_uuid(machine: str) -> str:
    """A name for the machine that cannot be turned back into its id."""
    return hashlib.blake2b(machine.encode(), key=b"distensor device", digest_size=8).hexdigest()


def _heat_files(sys: Path) -> list[Path]:
    """The inputs of the best chip there is; of several CPUs all."""
    chips: dict[str, list[Path]] = {}
    for folder in sorted(sys.glob("class/hwmon/hwmon*")):
        chips.setdefault(_text(folder / "name"), []).append(folder)
    for name in CHIPS:
        if name in chips:
            return [file for folder in chips[name] for file in sorted(folder.glob("temp*_input"))]
    zones = sorted(sys.glob("class/thermal/thermal_zone*"))
    return [zone / "temp" for zone in zones if _text(zone / "type") in ZONES]


def _hottest(files: Iterable[Path]) -> Reading[float]:
    found = [value / 1000 for file in files if (value := _number(file)) is not None]
    return max((value for value in found if 0 < value < ABSURD_C), default=_NO_SENSOR)


def _fastest(files: Iterable[Path]) -> Reading[float]:
    return max((value / 1000 for file in files if (value := _number(file)) is not None), default=_NO_SENSOR)


def _sum(files: Iterable[Path]) -> Reading[float]:
    found = [value / 1e6 for file in files if (value := _number(file)) is not None]
    return sum(found) if found else _NO_SENSOR


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
