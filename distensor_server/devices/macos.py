"""The GPU of a Mac, as plain JSON values. Runs in the probe child only, because it starts programs of the system.

`ioreg -a` prints the I/O registry as a property list: class IOAccelerator has the GPU with its PerformanceStatistics,
IOPlatformExpertDevice the machine. Power is told by powermetrics, to root only.
"""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Run: TypeAlias = Callable[[Sequence[str]], bytes]
"""Runs a program and returns its output; raises OSError or SubprocessError."""

ACCELERATOR = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-a", "-c", "IOAccelerator")
PLATFORM = ("/usr/sbin/ioreg", "-r", "-d", "1", "-a", "-c", "IOPlatformExpertDevice")
CHIP = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
SYSTEM = ("/usr/bin/sw_vers", "-productVersion")
HEAT = ("/usr/bin/pmset", "-g", "therm")
POWER = ("/usr/bin/powermetrics", "-n", "1", "-i", "200", "--samplers", "gpu_power")
SECONDS = 5.0


def run_program(command: Sequence[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=SECONDS).stdout


def apple_session(run: Run = run_program, *, is_root: bool | None = None) -> Callable[[], Json]:
    """What reads the Mac, once or again and again. A program that fails costs only what it would have told.

    What cannot change is asked once, for every question starts a program.
    """
    root = os.geteuid() == 0 if is_root is None else is_root
    facts = {
        "chip": _text(run, CHIP),
        "system": _text(run, SYSTEM),
        "platform_uuid": _from_registry(run, PLATFORM, lambda entry: entry["IOPlatformUUID"]),
    }
    return lambda: {**facts, **_moment(run, root)}


def _moment(run: Run, root: bool) -> Json:
    return {
        **_from_registry(run, ACCELERATOR, _gpu),
        "heat": _speed_limit(_text(run, HEAT)),
        "power_w": _power(_text(run, POWER)) if root else {"unavailable": "powermetrics tells the power to root only"},
    }


def _gpu(entry: Any) -> Json:
    statistics = entry["PerformanceStatistics"]
    return {
        "utilization": statistics["Device Utilization %"] / 100,
        "gpu_memory": statistics.get("In use system memory", {"unavailable": "the GPU's statistics do not hold it"}),
        "cores": entry.get("gpu-core-count", {"unavailable": "the I/O registry does not hold it"}),
    }


def _from_registry(run: Run, command: Sequence[str], pick: Callable[[Any], Any]) -> Any:
    """What `pick` finds in the first entry that has it."""
    try:
        entries = plistlib.loads(run(command))
    except (OSError, subprocess.SubprocessError, ValueError, plistlib.InvalidFileException) as error:
        return _nothing(command, f"ioreg: {_why(error)}")
    for entry in entries if isinstance(entries, list) else ():
        try:
            return pick(entry)
        except (KeyError, TypeError, ValueError):
            continue
    return _nothing(command, f"ioreg shows nothing of the kind in {command[-1]}")


def _nothing(command: Sequence[str], reason: str) -> Json:
    missing: Json = {"unavailable": reason}
    return dict.fromkeys(("utilization", "gpu_memory", "cores"), missing) if command == ACCELERATOR else missing


def _text(run: Run, command: Sequence[str]) -> Any:
    try:
        return run(command).decode("utf-8", "replace").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return {"unavailable": f"{command[0]}: {_why(error)}"}


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {SECONDS:g} s"
    return getattr(error, "strerror", None) or "its answer cannot be read"


def _speed_limit(text: Any) -> Any:
    """Percent of full speed that heat leaves; 100 where the system has noted no warning."""
    if isinstance(text, dict):
        return text
    found = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", text)
    return int(found[1]) if found else 100


def _power(text: Any) -> Any:
    if isinstance(text, dict):
        return text
    found = re.search(r"^GPU Power:\s*(\d+) mW", text, re.MULTILINE)
    return int(found[1]) / 1000 if found else {"unavailable": "powermetrics does not tell the GPU's power"}
