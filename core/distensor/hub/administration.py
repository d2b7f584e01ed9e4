"""Changes to accounts and keys. Each is one transaction with its line in the audit log, and is heard by every hub."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distensor.comm.keys import KeyKind
from distensor.core.errors import ConfigError
from distensor.core.ids import AccountId, KeyId
from distensor.hub.access_books import AccessBooks
from distensor.hub.accounts import Account, KeyRecord, Minted, Quota, mint_key, new_account, revoked, rotated
from distensor.hub.audit import AuditEntry, Outcome
from distensor.hub.authorization import Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class Clerk:
    """Who changes something, and when (whole UTC seconds)."""

    actor: str
    now: int

    def write(self, books: AccessBooks, action: str, target: str, detail: str = "") -> None:
        """The line in the audit log."""
        entry = AuditEntry(
            at=self.now, actor=self.actor, action=action, target=target, outcome=Outcome.DONE, detail=detail
        )
        books.append_audit(entry)
        books.raise_access_version()


def account_of(books: AccessBooks, name: str) -> Account:
    """Raises: ConfigError: there is none of this name."""
    account = books.find_account(AccountId(name))
    if account is None:
        raise ConfigError(f"there is no account {name!r}; `distensor hub account list` shows those that are")
    return account


def key_of(books: AccessBooks, name: str) -> KeyRecord:
    """Raises: ConfigError: there is none of this id."""
    key = books.key(KeyId(name))
    if key is None:
        raise ConfigError(f"there is no key {name[:70]!r}; expected an id as `distensor hub key list` shows it")
    return key


def add_account(books: AccessBooks, clerk: Clerk, name: str, kinds: frozenset[KeyKind]) -> Account:
    """Raises: ConfigError: the name is taken or not valid, or there is no kind."""
    account = new_account(name, kinds, clerk.now)
    if books.find_account(account.account_id) is not None:
        raise ConfigError(f"there is an account {name!r} already")
    books.save_account(account)
    clerk.write(books, "account add", name, ", ".join(sorted(kinds)))
    return account


def set_disabled(books: AccessBooks, clerk: Clerk, name: str, disabled: bool) -> Account:
    """Disable an account with all its keys, tokens and nodes, or enable it with those that were not revoked.

    Raises:
        ConfigError: there is none of this name.
    """
    account = account_of(books, name)
    if account.disabled != disabled:
        account = replace(account, disabled=disabled)
        books.save_account(account)
        clerk.write(books, "account disable" if disabled else "account enable", name)
    return account


def set_quota(books: AccessBooks, clerk: Clerk, name: str, quota: Quota) -> Account:
    """Raises: ConfigError: there is none of this name."""
    account = replace(account_of(books, name), quota=quota)
    books.save_account(account)
    clerk.write(books, "account limit", name, str(quota))
    return account


def create_key(
    books: AccessBooks,
    clerk: Clerk,
    name: str,
    kind: KeyKind,
    *,
    scopes: frozenset[Scope] | None = None,
    label: str = "",
    seconds: int | None = None,
) -> Minted:
    """A new key of an account, for so many seconds or until it is revoked.

    Raises:
        ConfigError: there is no such account, or it may not have such a key.
    """
    expires_at = None if seconds is None else clerk.now + seconds
    account = account_of(books, name)
    minted = mint_key(account, kind, clerk.now, scopes=scopes, label=label, expires_at=expires_at)
    books.save_key(minted.record)
    clerk.write(books, "key create", minted.record.key_id, _words(minted.record))
    return minted


def rotate_key(books: AccessBooks, clerk: Clerk, name: str, grace: int) -> Minted:
    """A key in the place of another, which ends after `grace` seconds. Nodes that joined by the old one stay.

    Raises:
        ConfigError: there is no such key, or it has ended or been replaced.
    """
    old, fresh = rotated(key_of(books, name), clerk.now, grace)
    books.save_key(old)
    books.save_key(fresh.record)
    clerk.write(books, "key rotate", old.key_id, f"to {fresh.record.key_id}; the old one ends in {grace} s")
    return fresh


def revoke_key(books: AccessBooks, clerk: Clerk, name: str) -> KeyRecord:
    """A key without effect from now on, also for the nodes that joined by it and for streams that are open.

    Raises:
        ConfigError: there is no such key.
    """
    before = key_of(books, name)
    after = revoked(before, clerk.now)
    if after != before:
        books.save_key(after)
        clerk.write(books, "key revoke", after.key_id, _words(after))
    return after


def _words(key: KeyRecord) -> str:
    label = f", {key.label!r}" if key.label else ""
    return f"{key.kind.value} key {key.shown} of {key.account_id}: {', '.join(sorted(key.scopes))}{label}"
