"""Accounts: who may use the hub."""

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
    IfMatch,
    IfNoneMatch,
    Limit,
    Page,
    location,
    page_of,
    require_match,
    sent,
    shown,
)
from distensor.cloud.context import Caller, guard
from distensor.cloud.problems import Refusal, responses
from distensor.cloud.shapes import AccountShape, account_shape
from distensor.comm.keys import KeyKind
from distensor.core.ids import AccountId
from distensor.hub import administration
from distensor.hub.accounts import Account, Quota
from distensor.hub.administration import Clerk
from distensor.hub.authorization import Operation
from distensor.hub.repository import Books

router = APIRouter(prefix="/v1/accounts", tags=["accounts"])

Name = Annotated[str, Path(pattern=NAME, description="the account's name")]
Reads = Annotated[Caller, Depends(guard(Operation.READ_ACCOUNTS))]
Adds = Annotated[Caller, Depends(guard(Operation.ADD_ACCOUNT))]
Changes = Annotated[Caller, Depends(guard(Operation.CHANGE_ACCOUNT))]
_MOST = 999_999
Count = Annotated[int, Field(ge=0, le=_MOST), WHOLE]


class NewAccount(Asked):
    """An account to be made."""

    account: str = Field(pattern=NAME, examples=["ann"])
    kinds: list[Annotated[KeyKind, Field(strict=False)]] = Field(min_length=1, max_length=3, examples=[["provider"]])


class NewLimits(Asked):
    """Only what is given is changed; null is without a limit."""

    workers: Count | None = None
    waiting: Count | None = None
    priority: Count = 0


class AccountChange(Asked):
    """Only what is given is changed."""

    disabled: bool | None = None
    limits: NewLimits | None = None


@router.get("", name="list_accounts", response_model=Page[AccountShape], responses=responses(409) | NOT_MODIFIED)
async def list_accounts(
    caller: Reads,
    kind: Annotated[KeyKind | None, Query(description="only those that may have such keys")] = None,
    disabled: Annotated[bool | None, Query(description="only those that are, or are not, disabled")] = None,
    after: After = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The accounts that the key may see, by name."""
    accounts = await caller.context.look(lambda books: books.accounts())
    found = [
        one
        for one in accounts
        if caller.only in (None, one.account_id)
        and (kind is None or kind in one.kinds)
        and disabled in (None, one.disabled)
    ]
    page, more = page_of(found, lambda one: one.account_id, after, limit)
    return shown(Page[AccountShape](items=[account_shape(one) for one in page], next=more), if_none_match)


@router.post("", name="add_account", status_code=201, response_model=AccountShape, responses=responses(409))
async def add_account(caller: Adds, asked: NewAccount, idempotency_key: IdempotencyKey = None) -> Response:
    """Make an account. It has no keys yet."""

    async def run() -> Response:
        account = await caller.context.change(lambda books: _add(books, caller.clerk(), asked))
        where = location(caller.request, "show_account", account=account.account_id)
        return sent(account_shape(account), 201, {"Location": where})

    return await caller.once(idempotency_key, asked, run)


def _add(books: Books, clerk: Clerk, asked: NewAccount) -> Account:
    return administration.add_account(books, clerk, asked.account, frozenset(asked.kinds))


@router.get("/{account}", name="show_account", response_model=AccountShape, responses=responses(404) | NOT_MODIFIED)
async def show_account(caller: Reads, account: Name, if_none_match: IfNoneMatch = None) -> Response:
    """One account."""
    found = await caller.context.look(lambda books: books.find_account(AccountId(account)))
    return shown(account_shape(require_account(caller, account, found)), if_none_match)


@router.patch("/{account}", name="change_account", response_model=AccountShape, responses=responses(404, 412))
async def change_account(caller: Changes, account: Name, asked: AccountChange, if_match: IfMatch = None) -> Response:
    """Shut an account out or let it in again, or set its limits."""
    found = await caller.context.look(lambda books: books.find_account(AccountId(account)))
    require_account(caller, account, found)
    changed = await caller.context.change(lambda books: _change(books, caller.clerk(), account, asked, if_match))
    return sent(account_shape(changed))


def require_account(caller: Caller, name: str, found: Account | None) -> Account:
    """Raises: ControlError: it is not there, or another one than the caller's."""
    caller.require(name, None if found is None else found.account_id, f"the hub knows no account {name}")
    assert found is not None, "required"
    return found


def _change(books: Books, clerk: Clerk, name: str, asked: AccountChange, if_match: str | None) -> Account:
    account = administration.account_of(books, name)
    require_match(if_match, account_shape(account))
    if asked.disabled is not None:
        account = administration.set_disabled(books, clerk, name, asked.disabled)
    if asked.limits is not None:
        account = administration.set_quota(books, clerk, name, _quota(account.quota, asked.limits))
    return account


def _quota(before: Quota, asked: NewLimits) -> Quota:
    given = asked.model_fields_set
    if not given:
        raise Refusal(422, "body.limits: expected at least one of workers, waiting, priority")
    return Quota(
        workers=asked.workers if "workers" in given else before.workers,
        waiting=asked.waiting if "waiting" in given else before.waiting,
        priority=asked.priority if "priority" in given else before.priority,
    )
