"""What a node and its hub say about money: sums by the hour, and single units. All amounts are integers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from distensor.core.control import Earnings, UnitKey
from distensor.core.ids import DeviceId, Epoch, JobId, Rank

HOUR_SECONDS = 3600
MOST_ROWS = 2000
"""Of one page: rows of a statement or units."""


def hour_of(now: float) -> int:
    """The hour of Unix time `now`, counted since 1970 in UTC."""
    return int(now // HOUR_SECONDS)


class UnitState(StrEnum):
    """Where the hub stands with a unit; only CREDITED ones are paid, and MISMATCHED ones never."""

    CLAIMED = "claimed"
    RECEIVED = "received"
    CREDITED = "credited"
    MISMATCHED = "mismatched"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class RowKey:
    """What one row of a statement sums up; also where the next page begins. Hour 0: before hours were kept."""

    hour: int
    job_id: JobId
    epoch: Epoch
    rank: Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class StatementRow:
    """The units of one rank that the hub credited in one hour of its clock."""

    key: RowKey
    device_id: DeviceId
    units: int
    micro: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StatementQuery:
    """Rows from `since_hour` on and behind `after`, at most `most` of them."""

    since_hour: int = 0
    after: RowKey | None = None
    most: int = MOST_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMoney:
    """Where a node's credits are, in micro-credits. `credited` is the sum of all others but the fees.

    `fees` are the platform's, beside what was credited.
    """

    credited: int = 0
    pending: int = 0
    """Within the challenge window."""
    held: int = 0
    """A spot check found something different; somebody has to decide."""
    payable: int = 0
    clearing: int = 0
    """In payouts that are on their way."""
    paid: int = 0
    void: int = 0
    """Taken back after a spot check."""
    fees: int = 0


NO_MONEY = NodeMoney()


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One page, in the order of the keys. `earnings` and `money` are those of the same moment: they equal the sum of
    all pages."""

    rows: tuple[StatementRow, ...]
    more: bool
    earnings: Earnings
    money: NodeMoney = NO_MONEY

    @property
    def paid_micro(self) -> int:
        """What left the ledger for the node's owner."""
        return self.money.paid


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitsQuery:
    """The units of one rank from `from_step` on."""

    job_id: JobId
    epoch: Epoch
    rank: Rank
    from_step: int = 0
    most: int = MOST_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class HubUnit:
    """A unit in the hub's books. `claimed` and `received` are micro-batches, None when nobody has said so."""

    key: UnitKey
    state: UnitState
    claimed: int | None
    received: int | None
    micro: int
    """Credited for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitsPage:
    units: tuple[HubUnit, ...]
    more: bool
