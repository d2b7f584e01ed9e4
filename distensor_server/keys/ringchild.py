"""The process that talks to the operating system's keyring: one JSON request on stdin, one answer on stdout.

A process of its own, because a locked keyring may wait for somebody at a screen for ever, and a library of the
desktop has no place in the supervisor. Only backends that are known to encrypt are used: `keyring` would otherwise
take whatever is installed, `keyrings.alt` among them, which writes plain text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

SERVICE = "distensor"
ACCOUNT = "api-key"
REAL = frozenset(
    {
        "keyring.backends.SecretService.Keyring",
        "keyring.backends.libsecret.Keyring",
        "keyring.backends.kwallet.DBusKeyring",
        "keyring.backends.kwallet.DBusKeyringKWallet4",
        "keyring.backends.macOS.Keyring",
    }
)


class Backend(Protocol):
    """What is used of `keyring.backend.KeyringBackend`."""

    def get_password(self, service: str, username: str) -> str | None: ...

    def set_password(self, service: str, username: str, password: str) -> None: ...

    def delete_password(self, service: str, username: str) -> None: ...


def name_of(backend: object) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def choose(backends: Iterable[Any]) -> Backend | None:
    """The real backend with the highest priority."""
    real = [backend for backend in backends if name_of(backend) in REAL]
    return max(real, key=lambda backend: float(backend.priority), default=None)


def answer(request: Mapping[str, Any], backends: Iterable[Any]) -> dict[str, Any]:
    """Do what is asked. Every failure is an answer with its reason; none repeats the key."""
    backend = choose(backends)
    if backend is None:
        return {"ok": False, "reason": "no keyring that encrypts is running here"}
    try:
        return {"ok": True, "backend": name_of(backend), "value": _do(request, backend)}
    except Exception as error:  # noqa: BLE001 - a backend may raise anything, and the reason is all we need
        locked = type(error).__name__ in ("KeyringLocked", "PromptDismissedException", "LockedException")
        reason = "it is locked; unlock it by logging in to the desktop" if locked else type(error).__name__
        return {"ok": False, "backend": name_of(backend), "reason": reason}


def _do(request: Mapping[str, Any], backend: Backend) -> str | None:
    match request.get("do"):
        case "get":
            value = backend.get_password(SERVICE, ACCOUNT)
            if not isinstance(value, str | None):
                raise TypeError("not text")
            return value
        case "set":
            backend.set_password(SERVICE, ACCOUNT, str(request["key"]))
            return None
        case "delete":
            if backend.get_password(SERVICE, ACCOUNT) is not None:
                backend.delete_password(SERVICE, ACCOUNT)
            return None
        case "probe":
            return None
    raise ValueError("unknown request")


def main() -> int:
    request = json.load(sys.stdin)
    from keyring.backend import get_all_keyring  # here: only this process pays for it

    json.dump(answer(request, get_all_keyring()), sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
