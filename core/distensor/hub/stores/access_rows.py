"""Accounts, keys and the audit log."""

from __future__ import annotations

from typing import Any

from distensor.comm.keys import KeyKind
from distensor.core.ids import AccountId, KeyId
from distensor.hub.accounts import Account, Barred, KeyRecord, Quota
from distensor.hub.audit import AuditEntry, Outcome
from distensor.hub.authorization import Scope
from distensor.hub.stores.rows import Rows

_ACCOUNT = "account_id, kinds, created_at, disabled, most_workers, most_waiting, priority"
_KEY = (
    "key_id, family, secret_hash, shown, kind, account_id, scopes, label, created_at, expires_at, revoked_at, "
    "last_used_at, replaced_by"
)


class AccessRows(Rows):
    """An `access_books.AccessBooks`."""

    def find_account(self, account_id: AccountId) -> Account | None:
        row = self._run(f"SELECT {_ACCOUNT} FROM accounts WHERE account_id = ?", (account_id,)).fetchone()
        return None if row is None else _account(row)

    def accounts(self) -> tuple[Account, ...]:
        return tuple(map(_account, self._run(f"SELECT {_ACCOUNT} FROM accounts ORDER BY account_id")))

    def save_account(self, account: Account) -> None:
        quota = account.quota
        self._run(
            f"INSERT INTO accounts ({_ACCOUNT}) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (account_id) DO UPDATE SET kinds = excluded.kinds, disabled = excluded.disabled, "
            "most_workers = excluded.most_workers, most_waiting = excluded.most_waiting, priority = excluded.priority",
            (
                account.account_id,
                " ".join(sorted(account.kinds)),
                account.created_at,
                int(account.disabled),
                quota.workers,
                quota.waiting,
                quota.priority,
            ),
        )

    def find_key(self, secret_hash: str) -> KeyRecord | None:
        row = self._run(f"SELECT {_KEY} FROM keys WHERE secret_hash = ?", (secret_hash,)).fetchone()
        return None if row is None else _key(row)

    def key(self, key_id: KeyId) -> KeyRecord | None:
        row = self._run(f"SELECT {_KEY} FROM keys WHERE key_id = ?", (key_id,)).fetchone()
        return None if row is None else _key(row)

    def list_keys(self, account_id: AccountId | None = None) -> tuple[KeyRecord, ...]:
        where, values = ("", ()) if account_id is None else ("WHERE account_id = ?", (account_id,))
        return tuple(map(_key, self._run(f"SELECT {_KEY} FROM keys {where} ORDER BY number", values)))

    def save_key(self, key: KeyRecord) -> None:
        self._run(
            f"INSERT INTO keys ({_KEY}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key_id) DO UPDATE SET scopes = excluded.scopes, label = excluded.label, "
            "expires_at = excluded.expires_at, revoked_at = excluded.revoked_at, replaced_by = excluded.replaced_by",
            (
                key.key_id,
                key.family,
                key.secret_hash,
                key.shown,
                key.kind.value,
                key.account_id,
                " ".join(sorted(key.scopes)),
                key.label,
                key.created_at,
                key.expires_at,
                key.revoked_at,
                key.last_used_at,
                key.replaced_by,
            ),
        )

    def touch_key(self, key_id: KeyId, at: int) -> None:
        self._run("UPDATE keys SET last_used_at = ? WHERE key_id = ?", (at, key_id))

    def barred(self) -> Barred:
        disabled = self._run("SELECT account_id FROM accounts WHERE disabled = 1").fetchall()
        gone = self._run("SELECT key_id, family, replaced_by FROM keys WHERE revoked_at IS NOT NULL").fetchall()
        return Barred(
            accounts=frozenset(AccountId(account_id) for (account_id,) in disabled),
            keys=frozenset(KeyId(key_id) for key_id, _, _ in gone),
            families=frozenset(KeyId(family) for _, family, replaced_by in gone if replaced_by is None),
        )

    def access_version(self) -> int:
        row = self._run("SELECT value FROM meta WHERE key = 'access'").fetchone()
        return 0 if row is None else int(row[0])

    def raise_access_version(self) -> None:
        self._run(
            "INSERT INTO meta (key, value) VALUES ('access', 1) ON CONFLICT (key) DO UPDATE SET value = meta.value + 1"
        )

    def append_audit(self, entry: AuditEntry) -> None:
        self._run(
            "INSERT INTO audit (at, actor, action, target, outcome, detail) VALUES (?, ?, ?, ?, ?, ?)",
            (entry.at, entry.actor, entry.action, entry.target, entry.outcome.value, entry.detail),
        )

    def audit(self, most: int, before: int | None = None) -> tuple[AuditEntry, ...]:
        where, values = ("", (most,)) if before is None else ("WHERE number < ?", (before, most))
        rows = self._run(
            f"SELECT number, at, actor, action, target, outcome, detail FROM audit {where} "
            "ORDER BY number DESC LIMIT ?",
            values,
        )
        return tuple(map(_entry, rows))


def _account(row: Any) -> Account:
    account_id, kinds, created_at, disabled, workers, waiting, priority = row
    return Account(
        account_id=AccountId(account_id),
        kinds=frozenset(map(KeyKind, kinds.split())),
        created_at=created_at,
        disabled=bool(disabled),
        quota=Quota(workers=workers, waiting=waiting, priority=priority),
    )


def _key(row: Any) -> KeyRecord:
    key_id, family, secret_hash, shown, kind, account_id, scopes, label, created_at, *rest = row
    expires_at, revoked_at, last_used_at, replaced_by = rest
    return KeyRecord(
        key_id=KeyId(key_id),
        family=KeyId(family),
        secret_hash=secret_hash,
        shown=shown,
        kind=KeyKind(kind),
        account_id=AccountId(account_id),
        scopes=frozenset(map(Scope, scopes.split())),
        label=label,
        created_at=created_at,
        expires_at=expires_at,
        revoked_at=revoked_at,
        last_used_at=last_used_at,
        replaced_by=None if replaced_by is None else KeyId(replaced_by),
    )


def _entry(row: Any) -> AuditEntry:
    number, at, actor, action, target, outcome, detail = row
    return AuditEntry(
        number=number, at=at, actor=actor, action=action, target=target, outcome=Outcome(outcome), detail=detail
    )
