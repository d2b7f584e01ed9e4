"""`distensor auth login|logout --system`: the key of the machine's own service, which is root's to give.

It lies in /etc/distensor/key, mode 0600, root's. systemd reads it at the start and hands it to the service as a
credential (LoadCredential=), so the user that systemd invents never opens the file, and nobody else can.
The unit names the file only while it is there, for systemd starts no unit whose credential is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor.comm.tokens import JoinToken
from distensor.core.errors import AuthenticationError, StoreError
from distensor_server.keys import files
from distensor_server.keys.identity import bring_back, set_aside
from distensor_server.keys.login import Check, check_with_hub, read_key
from distensor_server.keys.model import KeySource, masked
from distensor_server.service import actions
from distensor_server.service.layout import Layout
from distensor_server.service.manager import ServiceManager
from distensor_server.service.manifest import Manifest
from distensor_server.statedir import CREDENTIAL_FILE

ROOT_UID = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemKey:
    """The key file of a system installation and the service that reads it."""

    layout: Layout
    manager: ServiceManager
    uid: int
    say: Callable[[str], None]
    """Told before the service is restarted, which lets running work finish its round."""

    def log_in(self, text: str, *, test: bool, check: Check = check_with_hub) -> dict[str, Any]:
        """Keep the key and start the service with it.

        Raises:
            AuthenticationError: not root, or no good key.
            HubUnreachableError, HubProtocolError: the check failed; nothing is kept.
            StoreError: it cannot be kept.
            ServiceError: the service does not start with it; the key is kept.
        """
        self._demand_root()
        key = text.strip()
        token = asyncio.run(_checked(check, key)) if test else read_key(key)
        self._make_folder(self.layout.config)
        files.write_private(self.layout.key_file, key)
        bring_back(self._credential, token.fingerprint)
        return {
            "source": KeySource.CREDENTIALS.value,
            "where": str(self.layout.key_file),
            "key": masked(key),
            "hub": str(token.address),
            "tested": test,
            "supervisor": self._restarted(),
        }

    def log_out(self) -> dict[str, Any]:
        """Remove the key, set the identity aside, and start the service without both. Raises what `log_in` raises."""
        self._demand_root()
        removed = [str(self.layout.key_file)] if files.remove(self.layout.key_file) else []
        identity = set_aside(self._credential)
        self._restarted()
        return {"removed": removed, "identity": identity}

    @property
    def _credential(self) -> Path:
        return self.layout.state / CREDENTIAL_FILE

    def _demand_root(self) -> None:
        if self.uid != ROOT_UID:
            raise AuthenticationError("the key of the machine's service is root's to give: put sudo in front of it")

    def _make_folder(self, path: Path) -> None:
        """Readable by all, as the service's invented user has to see which files are not there."""
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be made: {error.strerror}") from error

    def _restarted(self) -> str:
        """Only a service that is there: writing its first unit is the installer's."""
        if not self.manager.unit_path.exists():
            return "not installed"
        self.say("the service is started again with this; running work has up to two minutes to finish its round")
        actions.install(self.manager, Manifest(self.layout.manifest), lambda _line: None)
        return "restarted"


async def _checked(check: Check, key: str) -> JoinToken:
    return await check(key)
