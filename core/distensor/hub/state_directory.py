"""The hub's directory: made for the owner only, and held by one hub at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from distensor.comm.address import HubAddress
from distensor.core.errors import StoreError
from distensor.hub.hashing import new_secret
from distensor.hub.pki import write_private


class StateDirectory:
    """Hold the directory for as long as this context lasts. A kill ends the hold too.

    Raises:
        StoreError: it cannot be made or written, or another hub holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    @property
    def database(self) -> Path:
        return self.path / "hub.sqlite"

    @property
    def address_file(self) -> Path:
        return self.path / "address"

    def __enter__(self) -> StateDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"state directory {self.path}: {error.strerror}; it must be writable") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise StoreError(f"state directory {self.path}: another hub is running on it") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def trainer_secret(self) -> str:
        """The secret of the trainer token: made once, and the same after every restart."""
        path = self.path / "trainer.secret"
        try:
            if not path.exists():
                write_private(path, new_secret().encode())
            return path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: {error}") from error

    def write_addresses(self, addresses: Sequence[HubAddress]) -> None:
        """Leave the hub's own address, and those of its other hubs, for `distensor hub token`."""
        try:
            write_private(self.address_file, "\n".join(map(str, addresses)).encode())
        except OSError as error:
            raise StoreError(f"{self.address_file}: {error.strerror}") from error
