"""Accounts, keys and the audit log as they are sent."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from distensor.cloud.answers import Shape
from distensor.comm.keys import KeyKind
from distensor.hub.accounts import Account, KeyRecord, ended
from distensor.hub.audit import AuditEntry, Outcome
from distensor.hub.authorization import Scope

Moment = Annotated[datetime, Field(description="UTC")]


def moment(at: int) -> datetime:
    """Of whole seconds since 1970."""
    return datetime.fromtimestamp(at, UTC)


def maybe_moment(at: int | None) -> datetime | None:
    return None if at is None else moment(at)


class Limits(Shape):
    """What the jobs of an account may take together; null is without a limit."""

    workers: int | None
    waiting: int | None
    priority: int


class AccountShape(Shape):
    """Who may use the hub."""

    account: str
    kinds: list[KeyKind] = Field(description="the kinds of keys that it may have")
    created_at: Moment
    disabled: bool
    limits: Limits


def account_shape(account: Account) -> AccountShape:
    quota = account.quota
    return AccountShape(
        account=account.account_id,
        kinds=sorted(account.kinds),
        created_at=moment(account.created_at),
        disabled=account.disabled,
        limits=Limits(workers=quota.workers, waiting=quota.waiting, priority=quota.priority),
    )


class KeyState(StrEnum):
    GOOD = "good"
    REPLACED = "replaced"
    EXPIRED = "expired"
    REVOKED = "revoked"


class KeyShape(Shape):
    """A key, without what is secret of it."""

    key: str
    begins: str = Field(description="the first characters of its text")
    kind: KeyKind
    account: str
    scopes: list[Scope]
    label: str
    state: KeyState = Field(description="one that is replaced is good until it expires")
    created_at: Moment
    expires_at: Moment | None
    revoked_at: Moment | None
    last_used_at: Moment | None
    replaced_by: str | None


def key_shape(key: KeyRecord, now: int) -> KeyShape:
    return KeyShape(
        key=key.key_id,
        begins=key.shown,
        kind=key.kind,
        account=key.account_id,
        scopes=sorted(key.scopes),
        label=key.label,
        state=state_of(key, now),
        created_at=moment(key.created_at),
        expires_at=maybe_moment(key.expires_at),
        revoked_at=maybe_moment(key.revoked_at),
        last_used_at=maybe_moment(key.last_used_at),
        replaced_by=key.replaced_by,
    )


def state_of(key: KeyRecord, now: int) -> KeyState:
    if why := ended(key, now):
        return KeyState.REVOKED if "revoked" in why else KeyState.EXPIRED
    return KeyState.GOOD if key.replaced_by is None else KeyState.REPLACED


class NewKeyShape(Shape):
    """A key that was just made: its text is shown this once."""

    key: KeyShape
    secret: str = Field(description="what stands behind Bearer")
    token: str = Field(
        description="the same with the address of the hub in it, for DISTENSOR_API_KEY or DISTENSOR_TOKEN"
    )


class CallerShape(Shape):
    """Whom the hub has recognised."""

    kind: str
    account: str
    key: str | None
    scopes: list[Scope]


class AuditShape(Shape):
    """One line of the audit log."""

    number: int
    at: Moment
    actor: str
    action: str
    target: str
    outcome: Outcome
    detail: str


def audit_shape(entry: AuditEntry) -> AuditShape:
    return AuditShape(
        number=entry.number,
        at=moment(entry.at),
        actor=entry.actor,
        action=entry.action,
        target=entry.target,
        outcome=entry.outcome,
        detail=entry.detail,
    )
