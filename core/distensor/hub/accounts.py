"""Accounts and their keys. Values and pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from distensor.comm.keys import KeyKind, new_key, shown_part
from distensor.core.errors import ConfigError
from distensor.core.ids import AccountId, KeyId, is_valid_name, new_key_id
from distensor.hub.authorization import Scope, Who, scopes_of
from distensor.hub.hashing import hash_secret

MAIN = AccountId("main")
"""The account of a standalone hub: its trainer token and the nodes that join without another account are of it."""
LONGEST_LABEL = 100
WHO = {KeyKind.PROVIDER: Who.PROVIDER, KeyKind.TRAINER: Who.TRAINER, KeyKind.ADMIN: Who.ADMIN}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What the jobs of an account may take together; None is without a limit."""

    workers: int | None = None
    """Of all jobs that are placed or run."""
    waiting: int | None = None
    """Jobs in the queue."""
    priority: int = 0
    """The highest that its jobs may ask for."""

    def __str__(self) -> str:
        workers = "any number of workers" if self.workers is None else f"{self.workers} workers"
        waiting = "any number of jobs" if self.waiting is None else f"{self.waiting} jobs"
        return f"{workers}, {waiting} in the queue, priority up to {self.priority}"


NO_QUOTA = Quota()


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Somebody who lends machines, trains, or runs the hub; or more than one of these. Never deleted.

    `kinds` are the kinds of keys that it may have. Times are whole UTC seconds of the hub's clock.
    """

    account_id: AccountId
    kinds: frozenset[KeyKind]
    created_at: int
    disabled: bool = False
    quota: Quota = NO_QUOTA


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """A key, known by the hash of its text and by the beginning that lists show."""

    key_id: KeyId
    family: KeyId
    """The first key of its row of rotations; its own id when it was not rotated from another."""
    secret_hash: str = field(repr=False)
    shown: str
    kind: KeyKind
    account_id: AccountId
    scopes: frozenset[Scope]
    label: str
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    last_used_at: int | None = None
    replaced_by: KeyId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Minted:
    """A new key: the record for the books, and the text that is shown once."""

    record: KeyRecord
    text: str = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Barred:
    """By what nobody comes in, and whoever is in has to go.

    `families` are rows of rotations whose newest key was revoked: the nodes that joined by any of them are barred. To
    revoke a key that has been replaced leaves its nodes alone.
    """

    accounts: frozenset[AccountId] = frozenset()
    keys: frozenset[KeyId] = frozenset()
    families: frozenset[KeyId] = frozenset()


def quotas_of(accounts: Iterable[Account]) -> dict[str, Quota]:
    return {account.account_id: account.quota for account in accounts}


def barred_by(accounts: Iterable[Account], keys: Iterable[KeyRecord]) -> Barred:
    gone = [key for key in keys if key.revoked_at is not None]
    return Barred(
        accounts=frozenset(account.account_id for account in accounts if account.disabled),
        keys=frozenset(key.key_id for key in gone),
        families=frozenset(key.family for key in gone if key.replaced_by is None),
    )


def new_account(name: str, kinds: frozenset[KeyKind], now: int) -> Account:
    """Raises: ConfigError: no valid name, or no kind of key."""
    if not is_valid_name(name):
        raise ConfigError(f"account {name!r}: expected 1 to 63 letters, digits, dots, dashes or underscores")
    if not kinds:
        raise ConfigError(f"account {name!r}: expected at least one of provider, trainer, admin")
    return Account(account_id=AccountId(name), kinds=kinds, created_at=now)


def main_account(now: int) -> Account:
    return new_account(MAIN, frozenset({KeyKind.PROVIDER, KeyKind.TRAINER}), now)


def mint_key(
    account: Account,
    kind: KeyKind,
    now: int,
    *,
    scopes: frozenset[Scope] | None = None,
    label: str = "",
    expires_at: int | None = None,
) -> Minted:
    """A new key of an account; without `scopes` with all that are of use to its kind.

    Raises:
        ConfigError: the account is disabled or has no keys of this kind, or a scope is of no use to the kind.
    """
    if account.disabled:
        raise ConfigError(f"account {account.account_id} is disabled; enable it first")
    if kind not in account.kinds:
        may = ", ".join(sorted(account.kinds))
        raise ConfigError(f"account {account.account_id} may have keys of kind {may}, not {kind.value}")
    if len(label) > LONGEST_LABEL or not label.isprintable():
        raise ConfigError(f"label of {len(label)} characters: expected at most {LONGEST_LABEL}, all printable")
    return _mint(account.account_id, kind, now, scopes=_checked(kind, scopes), label=label, expires_at=expires_at)


def _checked(kind: KeyKind, scopes: frozenset[Scope] | None) -> frozenset[Scope]:
    useful = scopes_of(WHO[kind])
    if scopes is None:
        return useful
    if wrong := sorted(scopes - useful):
        raise ConfigError(f"scope {wrong[0]} is of no use to a {kind.value} key: expected {', '.join(sorted(useful))}")
    if not scopes:
        raise ConfigError(f"a key without scopes may do nothing: expected some of {', '.join(sorted(useful))}")
    return scopes


def _mint(
    account_id: AccountId,
    kind: KeyKind,
    now: int,
    *,
    scopes: frozenset[Scope],
    label: str,
    expires_at: int | None,
    family: KeyId | None = None,
) -> Minted:
    text, key_id = new_key(kind), new_key_id()
    record = KeyRecord(
        key_id=key_id,
        family=family or key_id,
        secret_hash=hash_secret(text),
        shown=shown_part(text),
        kind=kind,
        account_id=account_id,
        scopes=scopes,
        label=label,
        created_at=now,
        expires_at=expires_at,
    )
    return Minted(record=record, text=text)


def rotated(key: KeyRecord, now: int, grace: int) -> tuple[KeyRecord, Minted]:
    """The old key, which ends after `grace` seconds, and the one that takes its place with the same rights.

    Raises:
        ConfigError: the key is revoked, expired, or replaced already.
    """
    if why := ended(key, now):
        raise ConfigError(f"key {key.key_id} {why}; make a new one with `distensor hub key create`")
    if key.replaced_by is not None:
        raise ConfigError(f"key {key.key_id} has been replaced by {key.replaced_by} already; rotate that one")
    fresh = _mint(
        key.account_id,
        key.kind,
        now,
        scopes=key.scopes,
        label=key.label,
        expires_at=key.expires_at,
        family=key.family,
    )
    ends = now + grace if key.expires_at is None else min(key.expires_at, now + grace)
    return replace(key, expires_at=ends, replaced_by=fresh.record.key_id), fresh


def revoked(key: KeyRecord, now: int) -> KeyRecord:
    """The key, for ever without effect. Revoking it again changes nothing."""
    return key if key.revoked_at is not None else replace(key, revoked_at=now)


def ended(key: KeyRecord, now: int) -> str | None:
    """Why the key has no effect any more; None while it has."""
    if key.revoked_at is not None:
        return "was revoked"
    if key.expires_at is not None and key.expires_at <= now:
        return "has expired"
    return None
