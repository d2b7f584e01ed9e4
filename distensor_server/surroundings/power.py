"""Mains or battery. Batteries of mice, headsets and UPS logic boards of other devices do not count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from distensor.core.reading import Reading, Unavailable

SUPPLIES = Path("/sys/class/power_supply")


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSource:
    """`percent` is the charge of the battery, None where there is none or it does not say."""

    on_battery: bool
    percent: float | None = None


ON_MAINS = PowerSource(on_battery=False)


def read_power(platform: str, supplies: Path = SUPPLIES) -> Reading[PowerSource]:
    """Where the machine's power comes from now."""
    return _from_psutil() if platform == "darwin" else _from_sysfs(supplies)


def _from_psutil() -> Reading[PowerSource]:
    import psutil

    battery = psutil.sensors_battery()
    if battery is None:
        return ON_MAINS
    plugged = cast("bool | None", battery.power_plugged)  # None: not known, says psutil's documentation
    if plugged is None:
        return Unavailable(reason="the battery does not say whether it is charged")
    return PowerSource(on_battery=not plugged, percent=float(battery.percent))


def _from_sysfs(supplies: Path) -> Reading[PowerSource]:
    """As the kernel's Documentation/ABI/testing/sysfs-class-power says it."""
    try:
        names = sorted(path for path in supplies.iterdir())
    except OSError:
        return ON_MAINS  # a kernel without the class knows no battery
    own = [path for path in names if _word(path / "scope") != "Device"]
    batteries = [path for path in own if _word(path / "type") == "Battery" and _word(path / "present") != "0"]
    if not batteries:
        return ON_MAINS
    percents = [float(text) for path in batteries if (text := _word(path / "capacity")).isdigit()]
    percent = sum(percents) / len(percents) if percents else None
    online = [text for path in own if _word(path / "type") in ("Mains", "USB") and (text := _word(path / "online"))]
    if online:
        return PowerSource(on_battery=all(text == "0" for text in online), percent=percent)
    states = {_word(path / "status") for path in batteries}
    if states <= {"", "Unknown"}:
        return Unavailable(reason=f"{batteries[0]} does not say whether it is charged")
    return PowerSource(on_battery="Discharging" in states, percent=percent)


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
