"""Payouts: set aside for the owner of a node, and what became of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field
from starlette.responses import Response

from distensor.cloud.answers import (
    NAME,
    NOT_MODIFIED,
    USUAL,
    After,
    Asked,
    IdempotencyKey,
    IfNoneMatch,
    Limit,
    Page,
    Shape,
    page_of,
    sent,
    shown,
)
from distensor.cloud.context import Caller, guard
from distensor.cloud.money import PayoutShape, payout_shape
from distensor.cloud.problems import responses
from distensor.cloud.routes.money import Micro
from distensor.core.ids import AccountId
from distensor.hub import cashier, ledger_queries
from distensor.hub.authorization import Operation
from distensor.hub.ledger_queries import PayoutLine, PayoutStanding
from distensor.hub.repository import Books

router = APIRouter(prefix="/v1/payouts", tags=["money"])

PayoutName = Annotated[str, Path(pattern=NAME, description="the payout's id")]
Reads = Annotated[Caller, Depends(guard(Operation.READ_PAYOUTS))]
Makes = Annotated[Caller, Depends(guard(Operation.MAKE_PAYOUT))]
Ends = Annotated[Caller, Depends(guard(Operation.END_PAYOUT))]
_LONGEST_REASON = 500
_PRINTABLE = r"^[^\x00-\x1f\x7f]*$"


class NewPayout(Asked):
    """What is to be set aside."""

    name: str = Field(pattern=NAME, description="a node, or an account for all its nodes")
    micro: Micro | None = Field(default=None, description="a part of it, for one node")
    key: str | None = Field(
        default=None, pattern=NAME, description="the payout's id, for one node: the same again is the same, for ever"
    )


class Ending(Asked):
    """For the audit log."""

    reason: str = Field(default="", max_length=_LONGEST_REASON, pattern=_PRINTABLE)


class MadeShape(Shape):
    """The payouts that were made."""

    items: list[PayoutShape]


@router.get("", name="list_payouts", response_model=Page[PayoutShape], responses=responses(409) | NOT_MODIFIED)
async def list_payouts(
    caller: Reads,
    node: Annotated[str | None, Query(description="only to this node", pattern=NAME)] = None,
    state: Annotated[PayoutStanding | None, Query(description="only those that stand so")] = None,
    after: After = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Payouts to the nodes that the key may see, the oldest first."""
    lines = await caller.context.look(lambda books: _lines(books, caller.only, node))
    found = [line for line in lines if state in (None, line.standing)]
    page, more = page_of(found, lambda line: line.payout_id, after, limit)
    return shown(Page[PayoutShape](items=list(map(payout_shape, page)), next=more), if_none_match)


def _lines(books: Books, account: AccountId | None, node: str | None) -> list[PayoutLine]:
    if account is None:
        return list(ledger_queries.payouts(books, node))
    nodes = [one for one in books.nodes_of(account) if node in (None, one)]
    found = [line for one in nodes for line in ledger_queries.payouts(books, one)]
    return sorted(found, key=lambda line: (line.begun_at, line.payout_id))


@router.get("/{payout}", name="show_payout", response_model=PayoutShape, responses=responses(404) | NOT_MODIFIED)
async def show_payout(caller: Reads, payout: PayoutName, if_none_match: IfNoneMatch = None) -> Response:
    """One payout."""
    return shown(payout_shape(await _require(caller, payout)), if_none_match)


async def _require(caller: Caller, name: str) -> PayoutLine:
    """Raises: ControlError: it is not there, or to another account's node."""

    def find(books: Books) -> tuple[PayoutLine | None, AccountId | None]:
        begun = books.find_transfer(f"payout/{name}")
        line = None if begun is None else ledger_queries.payout_line(books, begun)
        return line, None if line is None else books.owner_of_node(line.node_id)

    line, owner = await caller.context.look(find)
    caller.require(name, owner, f"the hub knows no payout {name}")
    assert line is not None, "required"
    return line


@router.post("", name="make_payouts", status_code=201, response_model=MadeShape, responses=responses(404, 409))
async def make_payouts(caller: Makes, asked: NewPayout, idempotency_key: IdempotencyKey = None) -> Response:
    """Set aside what is payable to a node, or to all nodes of an account. Whoever pays by hand then pays it."""
    owner = await caller.context.look(lambda books: _owner_of(books, asked.name))
    caller.require(asked.name, owner, f"the hub knows no account or node {asked.name}")

    async def run() -> Response:
        made = await caller.context.change(
            lambda books: cashier.make_payouts(books, caller.clerk(), asked.name, asked.micro, asked.key)
        )
        return sent(MadeShape(items=list(map(payout_shape, made))), 201)

    return await caller.once(idempotency_key, asked, run)


def _owner_of(books: Books, name: str) -> AccountId | None:
    account = books.find_account(AccountId(name))
    return books.owner_of_node(name) or (None if account is None else account.account_id)


@router.post("/{payout}/confirm", name="confirm_payout", response_model=PayoutShape, responses=responses(404, 409))
async def confirm_payout(caller: Ends, payout: PayoutName, asked: Ending | None = None) -> Response:
    """It was paid. The same answer again changes nothing; the other one is a conflict."""
    return await _end(caller, payout, asked, paid=True)


@router.post("/{payout}/fail", name="fail_payout", response_model=PayoutShape, responses=responses(404, 409))
async def fail_payout(caller: Ends, payout: PayoutName, asked: Ending | None = None) -> Response:
    """It was not paid and will not be: the amount is payable again."""
    return await _end(caller, payout, asked, paid=False)


async def _end(caller: Caller, name: str, asked: Ending | None, *, paid: bool) -> Response:
    await _require(caller, name)
    reason = "" if asked is None else asked.reason
    line = await caller.context.change(
        lambda books: cashier.end_payout(books, caller.clerk(), name, paid=paid, reason=reason)
    )
    return sent(payout_shape(line))
