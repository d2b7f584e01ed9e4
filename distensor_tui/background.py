"""Whether the background service is installed and failed: then 'not running' has a better reason than that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from distensor_tui.absence import Absence, Reason

UNIT, LABEL = "distensor.service", "org.distensor.server"
LIMIT_S = 2.0
_CAUSES = {
    73: ("its directory or socket cannot be made", "distensor doctor"),
    75: ("another supervisor uses its directory", "distensor doctor"),
    77: ("bad key", "distensor auth login"),
    78: ("a setting is wrong", "distensor doctor"),
}

SYSTEM_UNIT = Path("/etc/systemd/system") / UNIT

Run = Callable[[Sequence[str]], str]


def ask(words: Sequence[str]) -> str:
    """What the command says; nothing where there is no such command or it does not end."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def failed_exit(run: Run = ask, platform: str = sys.platform, uid: int | None = None) -> int | None:
    """The exit code with which the service of this user failed; None when it did not, or nobody can tell."""
    if platform == "darwin":
        text = run(["launchctl", "print", f"gui/{os.getuid() if uid is None else uid}/{LABEL}"])
        found = re.search(r"^\s*last exit code = (\d+)", text, re.MULTILINE)
        return int(found[1]) or None if found and "state = running" not in text else None
    properties = "--property=ActiveState,ExecMainStatus"
    told = dict(row.partition("=")[::2] for row in run(["systemctl", "--user", "show", UNIT, properties]).splitlines())
    code = told.get("ExecMainStatus", "")
    return int(code) or None if told.get("ActiveState") == "failed" and code.isdecimal() else None


def explained(
    why: Absence, exit_code: Callable[[], int | None] = failed_exit, system_unit: Path = SYSTEM_UNIT
) -> Absence:
    """The absence with the service's end, where that is why nobody listens, or with whose service it is."""
    code = exit_code() if why.reason is Reason.NOT_RUNNING else None
    if code is None:
        return _of_the_system(why) if why.reason is Reason.NOT_RUNNING and system_unit.exists() else why
    cause, fix = _CAUSES.get(code, ("its log says why", "distensor service status"))
    return replace(
        why,
        detail=f"The service is installed but failed: last exit {code} ({cause}). {why.detail}",
        fix=(f"repair it:             {fix}", "then start it again:   distensor service install"),
    )


def _of_the_system(why: Absence) -> Absence:
    return replace(
        why,
        detail=f"The supervisor of this machine is a service of its own, which only root may look at. {why.detail}",
        fix=("look at it:            sudo distensor", "does it run?           sudo distensor service status --system"),
    )
