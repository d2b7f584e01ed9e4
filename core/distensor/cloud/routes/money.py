"""Earnings, statements, costs and deposits: what the ledger says to those it concerns."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

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
    page_of,
    sent,
    shown,
)
from distensor.cloud.context import Caller, account_filter, guard
from distensor.cloud.money import (
    CostShape,
    DepositShape,
    EarningsShape,
    LedgerShape,
    StatementShape,
    TermsShape,
    cost_shape,
    deposit_shape,
    earnings_shape,
    ledger_shape,
    line_shape,
    terms_shape,
)
from distensor.cloud.problems import responses
from distensor.cloud.routes.jobs import require_job
from distensor.core.ids import AccountId
from distensor.hub import cashier, ledger_queries
from distensor.hub.authorization import Operation
from distensor.hub.ledger.statements import By, Line, to_csv
from distensor.hub.repository import Books

router = APIRouter(prefix="/v1", tags=["money"])

MOST_MICRO = 10**15
"""A thousand million credits at once: more is a slip of the pen."""
Micro = Annotated[int, Field(ge=1, le=MOST_MICRO), WHOLE]
ReadsTerms = Annotated[Caller, Depends(guard(Operation.READ_TERMS))]
ReadsEarnings = Annotated[Caller, Depends(guard(Operation.READ_EARNINGS))]
ReadsStatement = Annotated[Caller, Depends(guard(Operation.READ_STATEMENT))]
ReadsCost = Annotated[Caller, Depends(guard(Operation.READ_COST))]
ReadsDeposit = Annotated[Caller, Depends(guard(Operation.READ_DEPOSIT))]
EntersDeposit = Annotated[Caller, Depends(guard(Operation.ENTER_DEPOSIT))]
ReadsLedger = Annotated[Caller, Depends(guard(Operation.READ_LEDGER))]
AccountName = Annotated[str, Path(pattern=NAME, description="the account's name")]
_CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}


class Format(StrEnum):
    JSON = "json"
    CSV = "csv"


class NewDeposit(Asked):
    """What an account has paid in."""

    key: str = Field(pattern=NAME, description="of the bank's receipt: the same again is the same deposit, for ever")
    micro: Micro


@router.get("/terms", name="show_terms", response_model=TermsShape, responses=responses() | NOT_MODIFIED)
async def show_terms(caller: ReadsTerms, if_none_match: IfNoneMatch = None) -> Response:
    """Price, fee and challenge window for new jobs."""
    return shown(terms_shape(await caller.context.look(lambda books: books.policy())), if_none_match)


@router.get(
    "/earnings", name="list_earnings", response_model=Page[EarningsShape], responses=responses(409) | NOT_MODIFIED
)
async def list_earnings(
    caller: ReadsEarnings,
    account: Annotated[
        str | None, Query(description="of this account's nodes (the caller's own)", pattern=NAME)
    ] = None,
    after: After = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Where the credits of an account's nodes are, by node."""
    filtered = account_filter(caller, account)
    wanted = AccountId(caller.who.account) if filtered is None else filtered

    def find(books: Books) -> tuple[list[EarningsShape], str | None]:
        page, more = page_of(sorted(books.nodes_of(wanted)), str, after, limit)
        return [earnings_shape(node, ledger_queries.node_money(books, node)) for node in page], more

    items, more = await caller.context.look(find)
    return shown(Page[EarningsShape](items=items, next=more), if_none_match)


@router.get(
    "/nodes/{node}/earnings",
    name="show_earnings",
    response_model=EarningsShape,
    responses=responses(404) | NOT_MODIFIED,
)
async def show_earnings(
    caller: ReadsEarnings,
    node: Annotated[str, Path(pattern=NAME, description="its id")],
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Where the credits of one node are."""
    owner = await caller.context.look(lambda books: books.owner_of_node(node))
    caller.require(node, owner, f"the hub knows no node {node}")
    money = await caller.context.look(lambda books: ledger_queries.node_money(books, node))
    return shown(earnings_shape(node, money), if_none_match)


@router.get(
    "/statements/{name}",
    name="show_statement",
    response_model=StatementShape,
    responses=_CSV | responses(404) | NOT_MODIFIED,
)
async def show_statement(
    caller: ReadsStatement,
    name: Annotated[str, Path(pattern=NAME, description="an account's name or a node's id")],
    by: Annotated[By, Query(description="how to group")] = By.DAY,
    format_: Annotated[Format, Query(alias="format", description="JSON, or CSV for a spreadsheet")] = Format.JSON,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """What came and went in the ledger for a node, or for an account with its nodes, jobs and deposit."""
    owner = await caller.context.look(lambda books: _owner_of(books, name))
    caller.require(name, owner, f"the hub knows no account or node {name}")
    lines = await caller.context.look(lambda books: _lines(books, name, by))
    if format_ is Format.CSV:
        return Response(to_csv(lines), media_type="text/csv")
    return shown(StatementShape(name=name, by=by, lines=list(map(line_shape, lines))), if_none_match)


def _owner_of(books: Books, name: str) -> AccountId | None:
    if owner := books.owner_of_node(name):
        return owner
    account = books.find_account(AccountId(name))
    return None if account is None else account.account_id


def _lines(books: Books, name: str, by: By) -> tuple[Line, ...]:
    """None for an account that had nothing to do with money yet."""
    is_node = books.owner_of_node(name) is not None
    known = (
        is_node or books.nodes_of(name) or books.jobs_of(name) or ledger_queries.trainer_money(books, name).deposited
    )
    return ledger_queries.statement(books, ledger_queries.accounts_named(books, name), by) if known else ()


@router.get("/jobs/{job}/cost", name="show_cost", response_model=CostShape, responses=responses(404) | NOT_MODIFIED)
async def show_cost(
    caller: ReadsCost,
    job: Annotated[str, Path(pattern=NAME, description="the job's id")],
    if_none_match: IfNoneMatch = None,
) -> Response:
    """What a job costs so far."""
    found = await require_job(caller, job)
    cost = await caller.context.look(lambda books: ledger_queries.job_cost(books, found.job_id))
    return shown(cost_shape(cost), if_none_match)


@router.get(
    "/accounts/{account}/deposit",
    name="show_deposit",
    response_model=DepositShape,
    responses=responses(404) | NOT_MODIFIED,
)
async def show_deposit(caller: ReadsDeposit, account: AccountName, if_none_match: IfNoneMatch = None) -> Response:
    """What an account has paid in, and what is left of it."""
    await _require_account(caller, account)
    money = await caller.context.look(lambda books: ledger_queries.trainer_money(books, account))
    return shown(deposit_shape(money), if_none_match)


@router.post(
    "/accounts/{account}/deposit",
    name="enter_deposit",
    status_code=201,
    response_model=DepositShape,
    responses=responses(404, 409),
)
async def enter_deposit(
    caller: EntersDeposit, account: AccountName, asked: NewDeposit, idempotency_key: IdempotencyKey = None
) -> Response:
    """Enter what an account has paid in. Its `key` makes it safe to send again, also after years."""
    await _require_account(caller, account)

    async def run() -> Response:
        def enter(books: Books) -> DepositShape:
            cashier.deposit(books, caller.clerk(), account, asked.micro, asked.key)
            return deposit_shape(ledger_queries.trainer_money(books, account))

        return sent(await caller.context.change(enter), 201)

    return await caller.once(idempotency_key, asked, run)


async def _require_account(caller: Caller, name: str) -> None:
    found = await caller.context.look(lambda books: books.find_account(AccountId(name)))
    caller.require(name, None if found is None else found.account_id, f"the hub knows no account {name}")


@router.get("/ledger", name="show_ledger", response_model=LedgerShape, responses=responses() | NOT_MODIFIED)
async def show_ledger(caller: ReadsLedger, if_none_match: IfNoneMatch = None) -> Response:
    """The sums of the whole ledger."""
    return shown(ledger_shape(await caller.context.look(ledger_queries.totals)), if_none_match)
