"""The ledger as it is sent. All amounts are whole micro-credits."""

from __future__ import annotations

from pydantic import Field

from distensor.cloud.answers import Shape
from distensor.cloud.shapes import Moment, maybe_moment, moment
from distensor.core.job_report import JobCost
from distensor.core.statement import NodeMoney
from distensor.hub.ledger.accounts import Policy
from distensor.hub.ledger.statements import By, Line
from distensor.hub.ledger_queries import PayoutLine, PayoutStanding, Totals, TrainerMoney


class TermsShape(Shape):
    """What holds for jobs that are submitted from now on."""

    micro_per_micro_batch: int = Field(description="on one rank")
    fee_per_mille: int = Field(description="thousandths of it, rounded down for each unit, that are the platform's")
    challenge_seconds: int = Field(description="after how long a credit is payable")
    deposits: bool = Field(description="whether a job needs a deposit for its quote")


def terms_shape(policy: Policy) -> TermsShape:
    return TermsShape(
        micro_per_micro_batch=policy.micro_per_micro_batch,
        fee_per_mille=policy.fee_per_mille,
        challenge_seconds=policy.challenge_seconds,
        deposits=policy.deposits,
    )


class EarningsShape(Shape):
    """Where the credits of a node are. `credited` is the sum of all others but the fees."""

    node: str
    credited: int
    pending: int = Field(description="within the challenge window")
    held: int = Field(description="a spot check found something different")
    payable: int
    clearing: int = Field(description="in payouts that are on their way")
    paid: int
    void: int = Field(description="taken back after a spot check")
    fees: int = Field(description="the platform's, beside what was credited")


def earnings_shape(node: str, money: NodeMoney) -> EarningsShape:
    return EarningsShape(
        node=node,
        credited=money.credited,
        pending=money.pending,
        held=money.held,
        payable=money.payable,
        clearing=money.clearing,
        paid=money.paid,
        void=money.void,
        fees=money.fees,
    )


class LineShape(Shape):
    """Transfers of one kind in one group; what went is negative."""

    account: str = Field(description="of the ledger")
    group: str = Field(description="a day in UTC, a job or a device; empty for what belongs to none")
    kind: str
    transfers: int
    micro: int


class StatementShape(Shape):
    """What came and went; the lines of each account of the ledger sum to its balance."""

    name: str
    by: By
    lines: list[LineShape]


def line_shape(line: Line) -> LineShape:
    return LineShape(account=line.account, group=line.group, kind=line.kind, transfers=line.transfers, micro=line.micro)


class CostShape(Shape):
    """What a job costs its trainer so far."""

    job: str
    quoted: int = Field(description="0 for a job that did not say how much it will compute")
    escrow: int = Field(description="still set aside")
    refunded: int
    units: int
    spent: int = Field(description="work and fees together")
    work: int
    fees: int
    lent: int = Field(description="of what was spent, what the platform paid")


def cost_shape(cost: JobCost) -> CostShape:
    return CostShape(
        job=cost.job_id,
        quoted=cost.quoted,
        escrow=cost.escrow,
        refunded=cost.refunded,
        units=cost.units,
        spent=cost.spent,
        work=cost.work,
        fees=cost.fees,
        lent=cost.lent,
    )


class DepositShape(Shape):
    """The money of a trainer's account."""

    account: str
    deposited: int = Field(description="all that was ever paid in")
    deposit: int = Field(description="what can be spent")
    escrow: int = Field(description="what is set aside for jobs")


def deposit_shape(money: TrainerMoney) -> DepositShape:
    return DepositShape(account=money.account, deposited=money.deposited, deposit=money.deposit, escrow=money.escrow)


class LedgerShape(Shape):
    """The ledger by groups of accounts, and their sum, which is 0."""

    groups: dict[str, int]
    total: int


def ledger_shape(totals: Totals) -> LedgerShape:
    return LedgerShape(groups=totals.groups, total=totals.total)


class PayoutShape(Shape):
    """Money on its way to the owner of a node."""

    payout: str
    node: str
    micro: int
    state: PayoutStanding
    begun_at: Moment
    ended_at: Moment | None


def payout_shape(line: PayoutLine) -> PayoutShape:
    return PayoutShape(
        payout=line.payout_id,
        node=line.node_id,
        micro=line.micro,
        state=line.standing,
        begun_at=moment(line.begun_at),
        ended_at=maybe_moment(line.ended_at),
    )
