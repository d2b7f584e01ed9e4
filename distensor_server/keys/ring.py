"""The operating system's keyring, asked through a child process that is killed after two seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distensor.core.reading import Reading, Unavailable
from distensor_server.environment import scrubbed

COMMAND: Sequence[str] = (sys.executable, "-m", "distensor_server.keys.ringchild")
LIMIT_SECONDS = 2.0
DESKTOP = ("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR", "DISPLAY", "WAYLAND_DISPLAY", "XDG_CURRENT_DESKTOP")
"""What a backend needs to find its service, besides what every child may see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingAnswer:
    """What the keyring gave: a key, or None where it holds none of ours."""

    backend: str
    key: str | None

    def __repr__(self) -> str:
        return f"RingAnswer(backend={self.backend!r})"


class KeyRing:
    """All methods block for at most `limit` seconds."""

    def __init__(
        self, environment: Mapping[str, str], *, command: Sequence[str] = COMMAND, limit: float = LIMIT_SECONDS
    ) -> None:
        desktop = {name: environment[name] for name in DESKTOP if name in environment}
        self._environment = scrubbed(environment, desktop)
        self._command = list(command)
        self._limit = limit

    def get(self) -> Reading[RingAnswer]:
        return self._ask({"do": "get"})

    def set(self, key: str) -> Reading[RingAnswer]:
        return self._ask({"do": "set", "key": key})

    def delete(self) -> Reading[RingAnswer]:
        return self._ask({"do": "delete"})

    def probe(self) -> Reading[RingAnswer]:
        """Which backend there is, without touching what it holds."""
        return self._ask({"do": "probe"})

    def _ask(self, request: Mapping[str, str]) -> Reading[RingAnswer]:
        try:
            done = subprocess.run(
                self._command,
                input=json.dumps(dict(request)),
                capture_output=True,
                text=True,
                timeout=self._limit,
                env=self._environment,
                check=False,
                start_new_session=True,  # no terminal: it can prompt nobody
            )
        except subprocess.TimeoutExpired:
            return Unavailable(
                reason=f"it did not answer within {self._limit:g} s; unlock it by logging in to the desktop"
            )
        except OSError as error:
            return Unavailable(reason=f"it cannot be asked: {error.strerror}")
        return _read(done.stdout)


def _read(text: str) -> Reading[RingAnswer]:
    try:
        value = json.loads(text)
    except ValueError:
        return Unavailable(reason="the process that asks it failed")
    if not isinstance(value, dict) or value.get("ok") is not True:
        reason = value.get("reason") if isinstance(value, dict) else None
        return Unavailable(reason=str(reason or "it gave an answer that is none"))
    key, backend = value.get("value"), value.get("backend")
    if not isinstance(key, str | None) or not isinstance(backend, str):
        return Unavailable(reason="it gave something that is no text")
    return RingAnswer(backend=backend, key=key)
