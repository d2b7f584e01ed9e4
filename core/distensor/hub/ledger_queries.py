"""What the ledger says to those it concerns: nodes, trainers, jobs, the operator. Reads only.

All functions take the books of one transaction: `await writer.read(lambda books: node_money(books, node_id))` in a hub.
All amounts are micro-credits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from distensor.core.errors import ConfigError
from distensor.core.ids import AccountId, JobId, NodeId
from distensor.core.job_report import JobCost
from distensor.core.statement import HOUR_SECONDS, NodeMoney
from distensor.hub.ledger.accounts import clearing, escrow, fees, held, is_deposit, payable, pending, trainer
from distensor.hub.ledger.statements import By, Line, Sums
from distensor.hub.ledger.transfers import PLATFORM, Kind, Transfer


class Readable(Protocol):
    """The part of `ledger_books.MoneyBooks` that is read here."""

    def find_transfer(self, key: str) -> Transfer | None: ...

    def balance(self, account: str) -> int: ...

    def transfers_of(self, account: str) -> Iterable[Transfer]: ...

    def transfers_of_kind(self, kind: Kind) -> Iterable[Transfer]: ...

    def account_balances(self, prefix: str = "") -> dict[str, int]: ...

    def unit_sums(self, account: str, since_hour: int = 0) -> Sequence[tuple[int, str, str, int, int]]: ...

    def work_sum(self, account: str) -> tuple[int, int]: ...

    def job_sums(self, job_id: str) -> dict[str, int]: ...

    def units_of_job(self, job_id: str) -> int: ...

    def nodes_of(self, account: str) -> Sequence[NodeId]: ...

    def jobs_of(self, account: str) -> Sequence[JobId]: ...

    def owner_of_node(self, node_id: str) -> AccountId | None: ...


class PayoutStanding(StrEnum):
    """CLEARING: set aside, and nobody has said yet what became of it."""

    CLEARING = "clearing"
    PAID = "paid"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class PayoutLine:
    """A payout. Times are whole seconds of the hub's clock since 1970; `ended_at` is None while it is clearing."""

    payout_id: str
    node_id: NodeId
    micro: int
    begun_at: int
    standing: PayoutStanding
    ended_at: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMoney:
    """`deposited`: all that was ever paid in; `deposit`: what can be spent; `escrow`: what is set aside for jobs."""

    account: str
    deposited: int
    deposit: int
    escrow: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The ledger by groups of accounts (outside, platform, deposit, escrow, pending ...), and their sum, which is 0."""

    groups: dict[str, int]
    total: int


def node_money(books: Readable, node_id: str) -> NodeMoney:
    """Where a node's credits are. `credited` is pending, held, payable, in clearing, paid or void."""
    of_node = payouts(books, node_id)
    return NodeMoney(
        credited=books.work_sum(pending(node_id))[0],
        fees=books.balance(fees(node_id)),
        pending=books.balance(pending(node_id)),
        held=books.balance(held(node_id)),
        payable=books.balance(payable(node_id)),
        clearing=sum(one.micro for one in of_node if one.standing is PayoutStanding.CLEARING),
        paid=sum(one.micro for one in of_node if one.standing is PayoutStanding.PAID),
        void=-sum(_leg(one, held(node_id)) for one in books.transfers_of(held(node_id)) if one.kind is Kind.VOID),
    )


def account_money(books: Readable, account: str) -> dict[NodeId, NodeMoney]:
    """Where the credits of all nodes of an account are."""
    return {node_id: node_money(books, node_id) for node_id in books.nodes_of(account)}


def trainer_money(books: Readable, account: str) -> TrainerMoney:
    own = trainer(account)
    return TrainerMoney(
        account=account,
        deposited=sum(_leg(one, own) for one in books.transfers_of(own) if one.kind is Kind.DEPOSIT),
        deposit=books.balance(own),
        escrow=sum(books.balance(escrow(job_id)) for job_id in books.jobs_of(account)),
    )


def job_cost(books: Readable, job_id: JobId) -> JobCost:
    """What a job has cost so far; all 0 for one that nobody was credited for."""
    begun = books.find_transfer(f"escrow/{job_id}")
    sums = books.job_sums(job_id)
    work = sum(amount for account, amount in sums.items() if account.startswith("pending:"))
    fee = sum(amount for account, amount in sums.items() if account.startswith("fees:"))
    refunds = (one for one in books.transfers_of(escrow(job_id)) if one.kind is Kind.REFUND)
    return JobCost(
        job_id=job_id,
        quoted=0 if begun is None else _leg(begun, escrow(job_id)),
        escrow=books.balance(escrow(job_id)),
        refunded=-sum(_leg(one, escrow(job_id)) for one in refunds),
        units=books.units_of_job(job_id),
        spent=work + fee,
        work=work,
        fees=fee,
        lent=-sums.get(PLATFORM, 0),
    )


def payouts(books: Readable, node_id: str | None = None) -> tuple[PayoutLine, ...]:
    """The payouts of a node, or of all, oldest first."""
    found = books.transfers_of_kind(Kind.PAYOUT) if node_id is None else books.transfers_of(payable(node_id))
    return tuple(payout_line(books, one) for one in found if one.kind is Kind.PAYOUT)


def payout_line(books: Readable, begun: Transfer) -> PayoutLine:
    payout_id = begun.key.removeprefix("payout/")
    ended = books.find_transfer(f"payout-end/{payout_id}")
    source = next(account for account, amount in begun.legs if amount < 0)
    return PayoutLine(
        payout_id=payout_id,
        node_id=NodeId(source.partition(":")[2]),
        micro=_leg(begun, clearing(payout_id)),
        begun_at=begun.at,
        standing=PayoutStanding.CLEARING if ended is None else PayoutStanding(ended.kind.value),
        ended_at=None if ended is None else ended.at,
    )


def accounts_named(books: Readable, name: str) -> tuple[str, ...]:
    """The ledger's accounts behind the name of a node, or of an account: its nodes', its deposit, its jobs' escrows.

    Raises:
        ConfigError: nothing in the books has this name.
    """
    if books.owner_of_node(name) is not None:
        return node_accounts(name)
    mine = [account for node_id in books.nodes_of(name) for account in node_accounts(node_id)]
    jobs = books.jobs_of(name)
    if not mine and not jobs and not list(books.transfers_of(trainer(name))):
        raise ConfigError(f"{name!r}: expected a node of this hub, or an account that has nodes, jobs or a deposit")
    return (*mine, trainer(name), *(escrow(job_id) for job_id in jobs))


def node_accounts(node_id: str) -> tuple[str, ...]:
    """The fees are the platform's; they are in a node's statement so that it shows what its work cost the trainer."""
    return (pending(node_id), held(node_id), payable(node_id), fees(node_id))


def statement(books: Readable, accounts: Sequence[str], by: By) -> tuple[Line, ...]:
    """What came and went, by account and group; the lines of each account sum to its balance.

    `accounts`: see `accounts_named`, `node_accounts`. `ledger.statements` has `to_json` and `to_csv`.
    """
    sums = Sums(by)
    for account in accounts:
        for hour, job_id, device, count, micro in books.unit_sums(account):
            sums.add(account, Kind.UNIT, micro, at=hour * HOUR_SECONDS, job_id=job_id, device=device, count=count)
        for transfer in books.transfers_of(account):
            sums.add_transfer(transfer, account)
    return sums.lines()


def totals(books: Readable) -> Totals:
    groups: dict[str, int] = {}
    for account, amount in books.account_balances().items():
        group = account.partition(":")[0]
        groups[group] = groups.get(group, 0) + amount
    return Totals(groups=groups, total=sum(groups.values()))


def depositors(books: Readable) -> Iterator[str]:
    """The accounts that have something in deposit."""
    return (account.partition(":")[2] for account in books.account_balances() if is_deposit(account))


def _leg(transfer: Transfer, account: str) -> int:
    return dict(transfer.legs).get(account, 0)
