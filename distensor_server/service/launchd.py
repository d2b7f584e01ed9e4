"""launchd: an agent of the user, and `launchctl`. Not run on a Mac yet: tested against recorded answers."""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor.core.clock import Clock
from distensor.core.errors import ServiceError
from distensor.core.reading import Reading, Unavailable
from distensor_server.service.layout import LABEL, Layout
from distensor_server.service.manager import ServiceState, ServiceStatus
from distensor_server.service.ownership import marked
from distensor_server.service.runner import NOT_FOUND, Outcome, Runner, demand

TEMPLATE = Path(__file__).with_name("units") / "agent.plist"
GONE_S = 130.0
"""`bootout` may answer before the process is gone, which ExitTimeOut allows 120 s."""
LOOK_S = 0.2


class Launchd:
    """The service manager of macOS."""

    def __init__(self, layout: Layout, program: Path, run: Runner, clock: Clock, uid: int) -> None:
        self._layout = layout
        self._program = program
        self._run = run
        self._clock = clock
        self._domains = (f"gui/{uid}", f"user/{uid}")
        self.unit_path = layout.unit_folder / f"{LABEL}.plist"

    def render(self) -> str:
        values = {"@PROGRAM@": str(self._program), "@LOGS@": str(self._layout.logs)}
        content = _filled(plistlib.loads(TEMPLATE.read_bytes()), values)
        text = plistlib.dumps(content, sort_keys=False).decode()
        return marked(text, after=2, comment=("<!-- ", " -->"))

    def available(self) -> str | None:
        outcome = self._run("launchctl", "version")
        if outcome.code == NOT_FOUND:
            return "this machine has no launchctl; start `distensor-server run` by what starts your services"
        return None

    def activate(self) -> None:
        self.deactivate()
        self._layout.logs.mkdir(parents=True, exist_ok=True)
        domain, outcome = self._bootstrap()
        words = ("launchctl", "bootstrap", domain, str(self.unit_path))
        demand(outcome, words, f"`launchctl print {domain}/{LABEL}` and Console.app say more")
        # A plist that was disabled once stays so, whatever it says itself, and bootstrap does not mind.
        self._run("launchctl", "enable", f"{domain}/{LABEL}")

    def _bootstrap(self) -> tuple[str, Outcome]:
        """Over ssh without a desktop session there is no gui domain; the user's own is always there."""
        for domain in self._domains:
            self._run("launchctl", "enable", f"{domain}/{LABEL}")
            outcome = self._run("launchctl", "bootstrap", domain, str(self.unit_path))
            if outcome.ok:
                break
        return domain, outcome

    def deactivate(self) -> None:
        for domain in self._domains:
            if self._print(domain) is not None:
                self._run("launchctl", "bootout", f"{domain}/{LABEL}")
                self._wait_until_gone(domain)

    def _wait_until_gone(self, domain: str) -> None:
        deadline = self._clock.monotonic() + GONE_S
        while self._print(domain) is not None:
            if self._clock.monotonic() > deadline:
                raise ServiceError(
                    f"{domain}/{LABEL} did not end within {GONE_S:.0f} s after bootout; "
                    f"`launchctl kill KILL {domain}/{LABEL}` ends it"
                )
            self._clock.sleep(LOOK_S)

    def forget(self) -> None:
        """launchd keeps nothing of an agent that was booted out."""

    def status(self) -> ServiceStatus:
        told = next((told for domain in self._domains if (told := self._print(domain)) is not None), None)
        return ServiceStatus(
            manager="launchd",
            unit=self.unit_path,
            state=_state(told, installed=self.unit_path.exists()),
            enabled=told is not None,
            pid=_number(told, "pid", "it does not run"),
            last_exit=_number(told, "last exit code", "it has not ended yet"),
        )

    def _print(self, domain: str) -> Mapping[str, str] | None:
        outcome = self._run("launchctl", "print", f"{domain}/{LABEL}")
        return parse_print(outcome.text) if outcome.ok else None


def parse_print(text: str) -> Mapping[str, str]:
    """The facts of `launchctl print`: the lines `name = value` of the outermost block; the first of a name counts.

    Apple calls this output no interface, so nothing is required of it: what is not found is 'not available'.
    """
    facts: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"\t([a-z ]+) = ([^{]+)", line):
            facts.setdefault(found[1], found[2].strip())
    return facts


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """The template with its placeholders replaced in the parsed plist, where no character needs escaping."""
    if isinstance(value, dict):
        return {key: _filled(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, values) for inner in value]
    if isinstance(value, str):
        for name, replacement in values.items():
            value = value.replace(name, replacement)
    return value


def _state(told: Mapping[str, str] | None, *, installed: bool) -> ServiceState:
    if told is None:
        return ServiceState.STOPPED if installed else ServiceState.NOT_INSTALLED
    if told.get("state") == "running":
        return ServiceState.RUNNING
    failed = _number(told, "last exit code", "")
    return ServiceState.FAILED if failed else ServiceState.STOPPED


def _number(told: Mapping[str, str] | None, name: str, why: str) -> Reading[int]:
    """'78: EX_CONFIG' is 78; '(never exited)' is no number."""
    found = re.match(r"-?\d+", (told or {}).get(name, ""))
    return int(found[0]) if found else Unavailable(reason=why)
