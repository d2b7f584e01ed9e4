"""What accounts, keys and the audit log ask of the hub's store."""

from __future__ import annotations

from typing import Protocol

from distensor.core.ids import AccountId, KeyId
from distensor.hub.accounts import Account, Barred, KeyRecord
from distensor.hub.audit import AuditEntry


class AccessBooks(Protocol):
    """What accounts and keys need of a transaction."""

    def find_account(self, account_id: AccountId) -> Account | None: ...

    def save_account(self, account: Account) -> None: ...

    def accounts(self) -> tuple[Account, ...]:
        """All of them, by name."""

    def find_key(self, secret_hash: str) -> KeyRecord | None: ...

    def key(self, key_id: KeyId) -> KeyRecord | None: ...

    def save_key(self, key: KeyRecord) -> None:
        """A new key, or a new state of a known one; its hash, kind and account never change."""

    def list_keys(self, account_id: AccountId | None = None) -> tuple[KeyRecord, ...]:
        """Those of one account, or all; the oldest first."""

    def touch_key(self, key_id: KeyId, at: int) -> None:
        """The key was used."""

    def barred(self) -> Barred: ...

    def access_version(self) -> int:
        """A number that rises with every change that may bar somebody or let somebody in."""

    def raise_access_version(self) -> None: ...

    def append_audit(self, entry: AuditEntry) -> None: ...

    def audit(self, most: int, before: int | None = None) -> tuple[AuditEntry, ...]:
        """The newest entries, the newest first; `before` a number, to read on."""
