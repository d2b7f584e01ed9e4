"""systemd: the unit for one user or the machine, and `systemctl`."""

from __future__ import annotations

import grp
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from distensor.core.errors import ConfigError
from distensor.core.reading import Reading, Unavailable
from distensor_server.service.layout import UNIT, Layout
from distensor_server.service.manager import ServiceState, ServiceStatus
from distensor_server.service.ownership import marked
from distensor_server.service.runner import NOT_FOUND, Outcome, Runner, demand

TEMPLATES = Path(__file__).with_name("units")
GPU_GROUPS = ("video", "render")
_STATES = {
    "active": ServiceState.RUNNING,
    "reloading": ServiceState.RUNNING,
    "activating": ServiceState.STARTING,
    "failed": ServiceState.FAILED,
    "inactive": ServiceState.STOPPED,
    "deactivating": ServiceState.STOPPED,
}
_PROPERTIES = "LoadState,ActiveState,UnitFileState,MainPID,ExecMainStatus,ExecMainCode"


def known_groups(names: Sequence[str] = GPU_GROUPS) -> list[str]:
    """Those of `names` that this machine has: systemd starts no unit that names another one."""
    existing = {entry.gr_name for entry in grp.getgrall()}
    return [name for name in names if name in existing]


def manager_environment(run: Runner) -> dict[str, str]:
    """What systemd's instance for this user knows; nothing where there is none.

    Values with unusual characters come as $'...', which no path of ours needs: they are passed over.
    """
    outcome = run("systemctl", "--user", "show-environment")
    lines = outcome.text.splitlines() if outcome.ok else []
    return dict(line.split("=", 1) for line in lines if "=" in line and "=$'" not in line)


class Systemd:
    """The service manager of Linux, for one user or (`layout.system`) for the machine."""

    def __init__(
        self, layout: Layout, program: Path, run: Runner, groups: Callable[[], Sequence[str]] = known_groups
    ) -> None:
        self._layout = layout
        self._program = program
        self._run = run
        self._groups = groups
        self.unit_path = layout.unit_folder / UNIT

    def render(self) -> str:
        kind = "system" if self._layout.system else "user"
        text = (TEMPLATES / f"{kind}.service").read_text()
        key = self._layout.key_file
        groups = " ".join(self._groups())
        text = _line(text, "@CREDENTIAL@", f"LoadCredential=distensor_api_key:{key}" if key.exists() else "")
        variables = (f"Environment={quoted(f'{name}={value}')}" for name, value in self._layout.variables)
        text = _line(text, "@ENVIRONMENT@", "\n".join(variables))
        text = _line(text, "@GROUPS@", f"SupplementaryGroups={groups}" if groups else "")
        text = text.replace("@PROGRAM@", quoted(str(self._program)))
        return marked(text, after=0, comment=("# Own settings go into a drop-in (systemctl edit). ", ""))

    def available(self) -> str | None:
        outcome = self._ctl("show", "--property=Version")
        if outcome.ok:
            return None
        if outcome.code == NOT_FOUND:
            return "this machine has no systemd; start `distensor-server run` by what starts your services"
        if self._layout.system:
            return f"systemd does not answer: {outcome.text}"
        return (
            f"systemd has no instance for this user here ({outcome.text or 'it does not answer'}); log in at the "
            "machine or by ssh instead of su or sudo, or start `distensor-server run` by hand"
        )

    def activate(self) -> None:
        self._demand("daemon-reload")
        self._demand("reset-failed", UNIT, required=False)
        self._demand("enable", UNIT)
        self._demand("restart", UNIT)

    def deactivate(self) -> None:
        # `stop` waits until the last process of the unit is gone.
        self._demand("disable", "--now", UNIT)

    def forget(self) -> None:
        self._demand("daemon-reload", required=False)
        self._demand("reset-failed", UNIT, required=False)

    def status(self) -> ServiceStatus:
        outcome = self._ctl("show", UNIT, f"--property={_PROPERTIES}")
        told = dict(line.split("=", 1) for line in outcome.text.splitlines() if "=" in line)
        installed = self.unit_path.exists()
        return ServiceStatus(
            manager="systemd" if self._layout.system else "systemd --user",
            unit=self.unit_path,
            state=_state(told, installed=installed),
            enabled=told.get("UnitFileState") in {"enabled", "enabled-runtime"},
            pid=_number(told.get("MainPID", ""), zero="it does not run"),
            last_exit=_last_exit(told),
        )

    def _ctl(self, *words: str) -> Outcome:
        return self._run(*self._words(*words))

    def _words(self, *words: str) -> tuple[str, ...]:
        return ("systemctl", *(() if self._layout.system else ("--user",)), *words)

    def _demand(self, *words: str, required: bool = True) -> None:
        outcome = self._ctl(*words)
        if required:
            scope = "" if self._layout.system else " --user"
            demand(outcome, self._words(*words), f"`journalctl{scope} -u {UNIT} -n 20` says more")


def quoted(text: str) -> str:
    """A path between the double quotes of ExecStart= or Environment=, with the specifiers of systemd.unit(5) escaped.

    A dollar stays: variables are not replaced in the name of the program. systemd refuses names with quotation marks,
    backslashes and control characters, however they are escaped.

    Raises:
        ConfigError: it has one of these.
    """
    if found := re.search(r"[\x00-\x1f\x7f'\"\\]", text):
        raise ConfigError(f"{text!r} cannot be the program of a systemd unit: systemd refuses {found[0]!r} in its path")
    return '"' + text.replace("%", "%%") + '"'


def _line(text: str, placeholder: str, value: str) -> str:
    """Put `value` in the place of a line; an empty one takes the line away."""
    return text.replace(f"{placeholder}\n", f"{value}\n" if value else "")


def _state(told: dict[str, str], *, installed: bool) -> ServiceState:
    if not installed and told.get("LoadState") != "loaded":
        return ServiceState.NOT_INSTALLED
    return _STATES.get(told.get("ActiveState", ""), ServiceState.STOPPED)


def _number(text: str, *, zero: str) -> Reading[int]:
    if not text.isdigit():
        return Unavailable(reason="systemd does not tell it")
    return int(text) or Unavailable(reason=zero)


def _last_exit(told: dict[str, str]) -> Reading[int]:
    """ExecMainCode is 1 (CLD_EXITED) when a process ended by itself, 2 or 3 when a signal ended it."""
    status, code = told.get("ExecMainStatus", ""), told.get("ExecMainCode", "")
    if not status.isdigit() or code not in {"1", "2", "3"}:
        return Unavailable(reason="it has not ended yet")
    return int(status) if code == "1" else 128 + int(status)
