"""What is asked of the machine around: idle time, power, network, disk, time zone. With fake roots and programs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from distensor.core.errors import ConfigError
from distensor.core.reading import Reading, Unavailable
from distensor_server.policy.zones import local_zone, named_zone
from distensor_server.surroundings.ask import ask
from distensor_server.surroundings.idle import idle_seconds
from distensor_server.surroundings.metered import is_metered
from distensor_server.surroundings.power import PowerSource, read_power
from distensor_server.surroundings.surroundings import disk_free

pytestmark = pytest.mark.asyncio
NOW = 1_800_000_000.0
NOBODY = float("inf")


def session(**properties: str) -> str:
    """As `loginctl show-session` prints it."""
    shown = {"IdleHint": "no", "IdleSinceHint": "0", "Type": "tty", "Class": "user", "State": "active", **properties}
    return "".join(f"{name}={value}\n" for name, value in shown.items())


class Programs:
    """Answers by the first words of the command."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def ask(self, command: Sequence[str]) -> Reading[str]:
        words = " ".join(command)
        self.asked.append(words)
        found = next((text for start, text in self.answers.items() if start in words), None)
        return Unavailable(reason=f"{command[0]}: No such file or directory") if found is None else found


async def linux_idle(*sessions: str, tmp_path: Path, **desktop: str) -> Reading[float]:
    listed = "".join(f"{number} 1000 ann seat0\n" for number, _ in enumerate(sessions))
    shown = {f"show-session {number} ": text for number, text in enumerate(sessions)}
    programs = Programs({"list-sessions": listed, **shown, **desktop})
    return await idle_seconds(programs.ask, platform="linux", now=NOW, dev=tmp_path)


def since(seconds: float) -> str:
    return str(int((NOW - seconds) * 1e6))


@pytest.mark.parametrize(
    ("sessions", "seconds"),
    [
        ((), NOBODY),
        ((session(Class="greeter", Type="wayland"),), NOBODY),
        ((session(Class="manager"), session(State="closing")), NOBODY),
        ((session(),), 0.0),
        ((session(IdleHint="yes", IdleSinceHint=since(600)),), 600.0),
        ((session(IdleHint="yes", IdleSinceHint=since(600)), session(IdleHint="yes", IdleSinceHint=since(60))), 60.0),
        ((session(Type="wayland", IdleHint="yes", IdleSinceHint=since(90)),), 90.0),
        ((session(Type="wayland", IdleSinceHint=since(90)),), 0.0),
    ],
)
async def test_logind_says_who_is_there(sessions: tuple[str, ...], seconds: float, tmp_path: Path) -> None:
    assert await linux_idle(*sessions, tmp_path=tmp_path) == pytest.approx(seconds, abs=1e-3)


async def test_a_desktop_that_tells_nobody_is_no_reading_instead_of_in_use_for_ever(tmp_path: Path) -> None:
    """The complaint of others: waiting for idle for ever on Wayland."""
    found = await linux_idle(session(Type="wayland"), tmp_path=tmp_path)
    assert isinstance(found, Unavailable)
    assert "swayidle" in found.reason


@pytest.mark.parametrize(
    ("desktop", "seconds"),
    [
        ({"org.gnome.Mutter.IdleMonitor": "t 432000\n"}, 432.0),
        ({"org.freedesktop.ScreenSaver": "u 77\n"}, 77.0),
    ],
)
async def test_a_desktop_that_can_be_asked_is_asked(desktop: dict[str, str], seconds: float, tmp_path: Path) -> None:
    assert await linux_idle(session(Type="wayland"), tmp_path=tmp_path, **desktop) == seconds


async def test_without_logind_terminals_tell(tmp_path: Path) -> None:
    programs = Programs({})
    assert await idle_seconds(programs.ask, platform="linux", now=NOW, dev=tmp_path) == NOBODY
    (tmp_path / "pts").mkdir()
    for name, age in (("tty1", 900), ("pts/0", 120)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (NOW - age, NOW))
    assert await idle_seconds(programs.ask, platform="linux", now=NOW, dev=tmp_path) == 120.0


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ('    | |   "HIDIdleTime" = 5000000000\n    "HIDIdleTime" = 9\n', 5.0),
        ("+-o Root  <class IORegistryEntry>\n", NOBODY),
    ],
)
async def test_macos_counts_the_last_input(told: str, seconds: float) -> None:
    assert await idle_seconds(Programs({"ioreg": told}).ask, platform="darwin", now=NOW) == seconds
    assert isinstance(await idle_seconds(Programs({}).ask, platform="darwin", now=NOW), Unavailable)


def supply(root: Path, name: str, **files: str) -> None:
    (root / name).mkdir(parents=True)
    for file, text in files.items():
        (root / name / file).write_text(f"{text}\n")


LAPTOP = {"type": "Battery", "present": "1", "capacity": "63"}


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, PowerSource(on_battery=False)),
        ({"AC": {"type": "Mains", "online": "1"}}, PowerSource(on_battery=False)),
        (
            {"AC": {"type": "Mains", "online": "1"}, "BAT0": {**LAPTOP, "status": "Charging"}},
            PowerSource(on_battery=False, percent=63.0),
        ),
        (
            {"AC": {"type": "Mains", "online": "0"}, "BAT0": {**LAPTOP, "status": "Discharging"}},
            PowerSource(on_battery=True, percent=63.0),
        ),
        (
            {"AC": {"type": "Mains", "online": "0"}, "ucsi": {"type": "USB", "online": "1"}, "BAT0": LAPTOP},
            PowerSource(on_battery=False, percent=63.0),
        ),
        ({"BAT1": {**LAPTOP, "status": "Discharging"}}, PowerSource(on_battery=True, percent=63.0)),
        ({"BAT0": {**LAPTOP, "status": "Full"}}, PowerSource(on_battery=False, percent=63.0)),
        (
            {"BAT0": {**LAPTOP, "status": "Discharging"}, "BAT1": {**LAPTOP, "capacity": "37", "status": "Full"}},
            PowerSource(on_battery=True, percent=50.0),
        ),
        # A wireless mouse is no battery of this machine.
        (
            {"hidpp_battery_0": {**LAPTOP, "scope": "Device", "status": "Discharging"}},
            PowerSource(on_battery=False),
        ),
        ({"BAT0": {**LAPTOP, "present": "0"}}, PowerSource(on_battery=False)),
    ],
)
async def test_power_by_sysfs(tmp_path: Path, supplies: dict[str, dict[str, str]], expected: PowerSource) -> None:
    for name, files in supplies.items():
        supply(tmp_path / "power", name, **files)
    assert read_power("linux", tmp_path / "power") == expected


async def test_a_battery_that_says_nothing_is_no_reading(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", **LAPTOP, status="Unknown")
    assert isinstance(read_power("linux", tmp_path), Unavailable)


@pytest.mark.parametrize(
    ("battery", "expected"),
    [
        (None, PowerSource(on_battery=False)),
        ((80, True), PowerSource(on_battery=False, percent=80.0)),
        ((41, False), PowerSource(on_battery=True, percent=41.0)),
        ((41, None), None),
    ],
)
async def test_power_on_macos(monkeypatch: pytest.MonkeyPatch, battery: Any, expected: PowerSource | None) -> None:
    class Told:
        percent, power_plugged = battery or (0, None)

    monkeypatch.setattr(psutil, "sensors_battery", lambda: None if battery is None else Told(), raising=False)
    found = read_power("darwin")
    assert found == expected if expected else isinstance(found, Unavailable)


@pytest.mark.parametrize(("told", "expected"), [("u 1\n", True), ("u 3\n", True), ("u 2\n", False), ("u 4\n", False)])
async def test_metered_networks(told: str, expected: bool) -> None:
    assert await is_metered(Programs({"busctl": told}).ask, platform="linux") is expected


@pytest.mark.parametrize(
    ("answers", "platform", "words"),
    [
        ({"busctl": "u 0\n"}, "linux", "NetworkManager does not know"),
        ({"busctl": "s x\n"}, "linux", "answered 's x'"),
        ({}, "linux", "NetworkManager cannot be asked (busctl: No such file"),
        ({"busctl": "u 1"}, "darwin", "macOS does not tell"),
    ],
)
async def test_a_network_that_nobody_knows_of(answers: dict[str, str], platform: str, words: str) -> None:
    found = await is_metered(Programs(answers).ask, platform=platform)
    assert isinstance(found, Unavailable)
    assert words in found.reason


async def test_a_program_is_asked_with_a_time_limit_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTENSOR_API_KEY", "secret")
    script = "import os; print('DISTENSOR_API_KEY' in os.environ)"
    assert await ask((sys.executable, "-I", "-S", "-c", script)) == "False\n"
    late = await ask((sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"), seconds=0.1)
    assert isinstance(late, Unavailable)
    assert "did not answer within 0.1 s" in late.reason
    failed = await ask((sys.executable, "-I", "-S", "-c", "raise SystemExit(3)"))
    assert isinstance(failed, Unavailable)
    assert "ended with 3" in failed.reason
    missing = await ask(("/nowhere/loginctl",))
    assert missing == Unavailable(reason="/nowhere/loginctl: No such file or directory")
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    await asyncio.sleep(0)


async def test_free_disk(tmp_path: Path) -> None:
    found = disk_free(tmp_path)
    assert isinstance(found, int)
    assert found > 0
    assert isinstance(disk_free(tmp_path / "none"), Unavailable)


async def test_the_zone_of_the_machine(tmp_path: Path) -> None:
    berlin, summer = named_zone("Europe/Berlin"), datetime(2026, 7, 1, tzinfo=UTC)
    assert local_zone({"TZ": ":Europe/Berlin"}) == berlin
    assert local_zone({"TZ": "No/Where"}) is UTC
    assert local_zone({}, tmp_path / "none") is UTC
    file = next(root / "Europe/Berlin" for root in ZONE_ROOTS if (root / "Europe/Berlin").exists())
    for zone in (local_zone({}, file), local_zone({"TZ": str(file)})):
        assert summer.astimezone(zone).utcoffset() == summer.astimezone(berlin).utcoffset()
    with pytest.raises(ConfigError, match="no time zone 'No/Where'"):
        named_zone("No/Where")


def _zone_roots() -> list[Path]:
    import zoneinfo

    return [Path(root) for root in zoneinfo.TZPATH]


ZONE_ROOTS = _zone_roots()
