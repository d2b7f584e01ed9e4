"""Accounts, keys and the audit log in memory: a part of `hub_store`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distensor.core.ids import AccountId, KeyId
from distensor.hub.accounts import Account, Barred, KeyRecord, barred_by
from distensor.hub.audit import AuditEntry


@dataclass(slots=True)
class AccessTables:
    version: int = 0
    accounts: dict[AccountId, Account] = field(default_factory=dict)
    keys: dict[KeyId, KeyRecord] = field(default_factory=dict)
    audit: list[AuditEntry] = field(default_factory=list)

    def copied(self) -> AccessTables:
        return AccessTables(
            version=self.version,
            accounts=dict(self.accounts),
            keys=dict(self.keys),
            audit=list(self.audit),
        )


class MemoryAccessBooks:
    """A `distensor.hub.access_books.AccessBooks`."""

    @property
    def _access(self) -> AccessTables:
        raise NotImplementedError

    def find_account(self, account_id: AccountId) -> Account | None:
        return self._access.accounts.get(account_id)

    def save_account(self, account: Account) -> None:
        self._access.accounts[account.account_id] = account

    def accounts(self) -> tuple[Account, ...]:
        return tuple(sorted(self._access.accounts.values(), key=lambda account: account.account_id))

    def find_key(self, secret_hash: str) -> KeyRecord | None:
        return next((key for key in self._access.keys.values() if key.secret_hash == secret_hash), None)

    def key(self, key_id: KeyId) -> KeyRecord | None:
        return self._access.keys.get(key_id)

    def save_key(self, key: KeyRecord) -> None:
        if key.account_id not in self._access.accounts:
            raise ValueError(f"key {key.key_id} is of no known account: {key.account_id}")
        self._access.keys[key.key_id] = key

    def list_keys(self, account_id: AccountId | None = None) -> tuple[KeyRecord, ...]:
        found = (key for key in self._access.keys.values() if account_id in (None, key.account_id))
        return tuple(sorted(found, key=lambda key: (key.created_at, key.key_id)))

    def touch_key(self, key_id: KeyId, at: int) -> None:
        self._access.keys[key_id] = replace(self._access.keys[key_id], last_used_at=at)

    def barred(self) -> Barred:
        return barred_by(self._access.accounts.values(), self._access.keys.values())

    def access_version(self) -> int:
        return self._access.version

    def raise_access_version(self) -> None:
        self._access.version += 1

    def append_audit(self, entry: AuditEntry) -> None:
        self._access.audit.append(replace(entry, number=len(self._access.audit) + 1))

    def audit(self, most: int, before: int | None = None) -> tuple[AuditEntry, ...]:
        found = [entry for entry in self._access.audit if before is None or entry.number < before]
        return tuple(reversed(found))[:most]
