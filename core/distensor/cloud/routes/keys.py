"""Keys of accounts, and who the caller is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field
from starlette.responses import Response

from distensor.cloud.answers import (
    NAME,
    NOT_MODIFIED,
    USUAL,
    WHOLE,
    After,
    Asked,
    IdempotencyKey,
    IfNoneMatch,
    Limit,
    Page,
    location,
    page_of,
    sent,
    shown,
)
from distensor.cloud.context import Caller, account_filter, guard
from distensor.cloud.problems import Refusal, responses
from distensor.cloud.shapes import CallerShape, KeyShape, KeyState, NewKeyShape, key_shape, state_of
from distensor.comm.keys import KeyKind
from distensor.comm.tokens import JoinToken, Role
from distensor.core.ids import AccountId, KeyId
from distensor.hub import administration
from distensor.hub.accounts import LONGEST_LABEL, KeyRecord, Minted
from distensor.hub.authorization import Operation, Scope, Who, scopes_of

router = APIRouter(prefix="/v1", tags=["keys"])

KeyName = Annotated[str, Path(pattern=NAME, description="the key's id")]
Asks = Annotated[Caller, Depends(guard(Operation.WHO_AM_I))]
Reads = Annotated[Caller, Depends(guard(Operation.READ_KEYS))]
Creates = Annotated[Caller, Depends(guard(Operation.CREATE_KEY))]
Rotates = Annotated[Caller, Depends(guard(Operation.ROTATE_KEY))]
Revokes = Annotated[Caller, Depends(guard(Operation.REVOKE_KEY))]
DAY = 86_400
_LONGEST_DAYS = 36_500
_LONGEST_HOURS = 8760


class NewKey(Asked):
    """A key to be made."""

    account: str = Field(pattern=NAME, examples=["ann"])
    kind: KeyKind = Field(strict=False, examples=["provider"])
    scopes: list[Annotated[Scope, Field(strict=False)]] | None = Field(
        default=None, min_length=1, max_length=len(Scope), description="null: all that its kind may have"
    )
    label: str = Field(default="", max_length=LONGEST_LABEL, examples=["garage"])
    days: Annotated[int, Field(ge=1, le=_LONGEST_DAYS), WHOLE] | None = Field(
        default=None, description="null: it does not end by itself"
    )


class Rotation(Asked):
    """How a key is replaced."""

    hours: Annotated[int, Field(ge=0, le=_LONGEST_HOURS), WHOLE] = Field(
        default=24, description="how long the old key is good meanwhile"
    )


@router.get("/me", name="who_am_i", response_model=CallerShape, responses=responses())
async def who_am_i(caller: Asks) -> Response:
    """Whom the hub has recognised by the key."""
    who = caller.who
    scopes = sorted(map(Scope, who.scopes))
    return sent(CallerShape(kind=who.kind, account=who.account, key=who.key or None, scopes=scopes))


@router.get("/keys", name="list_keys", response_model=Page[KeyShape], responses=responses(409) | NOT_MODIFIED)
async def list_keys(
    caller: Reads,
    account: Annotated[str | None, Query(description="only this account's", pattern=NAME)] = None,
    kind: Annotated[KeyKind | None, Query(description="only of this kind")] = None,
    state: Annotated[KeyState | None, Query(description="only those that are in this state")] = None,
    after: After = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Keys, the oldest first."""
    wanted, now = account_filter(caller, account), caller.clerk().now
    keys = await caller.context.look(lambda books: books.list_keys(wanted))
    found = [one for one in keys if kind in (None, one.kind) and state in (None, state_of(one, now))]
    page, more = page_of(found, lambda one: one.key_id, after, limit)
    return shown(Page[KeyShape](items=[key_shape(one, now) for one in page], next=more), if_none_match)


@router.post("/keys", name="create_key", status_code=201, response_model=NewKeyShape, responses=responses(404, 409))
async def create_key(caller: Creates, asked: NewKey, idempotency_key: IdempotencyKey = None) -> Response:
    """Make a key. Its text is in this one answer and never again."""
    _require_own_scopes(caller, asked)
    found = await caller.context.look(lambda books: books.find_account(AccountId(asked.account)))
    owner = None if found is None else found.account_id
    caller.require(asked.account, owner, f"the hub knows no account {asked.account}")

    async def run() -> Response:
        minted = await caller.context.change(
            lambda books: administration.create_key(
                books,
                caller.clerk(),
                asked.account,
                asked.kind,
                scopes=frozenset(asked.scopes) if asked.scopes else None,
                label=asked.label,
                seconds=None if asked.days is None else asked.days * DAY,
            )
        )
        return _made(caller, minted)

    return await caller.once(idempotency_key, asked, run)


def _require_own_scopes(caller: Caller, asked: NewKey) -> None:
    """Raises: Refusal: an admin's key would be made that may do more than the one that makes it."""
    if asked.kind is not KeyKind.ADMIN:
        return
    wanted = scopes_of(Who.ADMIN) if asked.scopes is None else set(asked.scopes)
    if more := sorted(wanted - set(caller.who.scopes)):
        raise Refusal(403, f"an admin key makes others with its own scopes only, not with {', '.join(more)}")


def _made(caller: Caller, minted: Minted) -> Response:
    record, ready = minted.record, caller.context.ready
    role = Role.NODE if record.kind is KeyKind.PROVIDER else Role.TRAINER
    token = JoinToken(address=ready.address, fingerprint=ready.fingerprint, role=role, secret=minted.text).encode()
    shape = NewKeyShape(key=key_shape(record, caller.clerk().now), secret=minted.text, token=token)
    return sent(shape, 201, {"Location": location(caller.request, "show_key", key=record.key_id)})


@router.get("/keys/{key}", name="show_key", response_model=KeyShape, responses=responses(404) | NOT_MODIFIED)
async def show_key(caller: Reads, key: KeyName, if_none_match: IfNoneMatch = None) -> Response:
    """One key, without its text."""
    return shown(key_shape(await _require_key(caller, key), caller.clerk().now), if_none_match)


async def _require_key(caller: Caller, name: str) -> KeyRecord:
    """Raises: ControlError: it is not there, or another account's."""
    found = await caller.context.look(lambda books: books.key(KeyId(name)))
    caller.require(name, None if found is None else found.account_id, f"the hub knows no key {name}")
    assert found is not None, "required"
    return found


@router.post(
    "/keys/{key}/rotate", name="rotate_key", status_code=201, response_model=NewKeyShape, responses=responses(404, 409)
)
async def rotate_key(
    caller: Rotates, key: KeyName, asked: Rotation | None = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """Make a key that takes the place of another. Machines that joined by the old one stay."""
    before = await _require_key(caller, key)
    if before.kind is KeyKind.ADMIN and not before.scopes <= set(caller.who.scopes):
        raise Refusal(403, "an admin key may rotate those whose scopes it has itself")
    grace = (asked or Rotation()).hours * 3600

    async def run() -> Response:
        minted = await caller.context.change(lambda books: administration.rotate_key(books, caller.clerk(), key, grace))
        return _made(caller, minted)

    return await caller.once(idempotency_key, asked, run)


@router.post("/keys/{key}/revoke", name="revoke_key", response_model=KeyShape, responses=responses(404))
async def revoke_key(caller: Revokes, key: KeyName) -> Response:
    """End a key, and whatever is open by it. Revoking it again changes nothing."""
    await _require_key(caller, key)
    after = await caller.context.change(lambda books: administration.revoke_key(books, caller.clerk(), key))
    return sent(key_shape(after, caller.clerk().now))
