"""What a ledger is made of: transfers of whole micro-credits between accounts, each known by a key for ever.

    outside --deposit--> trainer --escrow--> escrow of the job --unit--> pending of the node (and the platform's fee)
    pending --after the challenge window--> payable --payout--> clearing --paid--> outside
    escrow --job ended--> trainer;  clearing --payout failed--> payable;  held --spot check failed--> trainer

A key that comes again with the same transfer changes nothing; with another one it is refused. So every order is
repeated until it is answered, and whatever arrives twice, late or in another order leaves the same books.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from distensor.core.errors import LedgerError

OUTSIDE = "outside"
"""The world: negative by what it has paid in and not got back."""
PLATFORM = "platform"
"""What the operator lends where no deposits are demanded. May be negative."""
MAY_BE_NEGATIVE = frozenset({OUTSIDE, PLATFORM})


class Kind(StrEnum):
    DEPOSIT = "deposit"
    ESCROW = "escrow"
    UNIT = "unit"
    HOLD = "hold"
    RELEASE = "release"
    VOID = "void"
    MATURE = "mature"
    REFUND = "refund"
    PAYOUT = "payout"
    PAID = "paid"
    FAILED = "failed"
    LENT = "lent"
    """What the platform had lent before there were deposits; one transfer for each trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Amounts by account, in micro-credits, whose sum is 0.

    Raises:
        LedgerError: they are not whole, not balanced, or one of them is 0.
    """

    key: str
    kind: Kind
    legs: tuple[tuple[str, int], ...]
    at: int
    """Seconds of the hub's clock since 1970; proves and orders nothing."""
    job_id: str = ""
    device: str = ""
    hour: int = 0
    """In which the unit was credited, for what happens to a unit later; 0 for all else."""

    def __post_init__(self) -> None:
        if any(type(amount) is not int or amount == 0 for _, amount in self.legs):
            raise LedgerError(f"transfer {self.key}: an amount is not a whole number other than 0: {self.legs}")
        if sum(amount for _, amount in self.legs) != 0:
            raise LedgerError(f"transfer {self.key}: its amounts sum to {sum(a for _, a in self.legs)}, not to 0")
        if len({account for account, _ in self.legs}) != len(self.legs):
            raise LedgerError(f"transfer {self.key}: an account occurs twice")

    def same_as(self, other: Transfer) -> bool:
        """All but the times: an order that is repeated is the same order."""
        return (self.kind, self.legs, self.job_id, self.device) == (
            other.kind,
            other.legs,
            other.job_id,
            other.device,
        )


class LedgerBooks(Protocol):
    """What the ledger needs of a transaction."""

    def alone(self) -> None:
        """From here to the end of the transaction nobody else changes the ledger."""

    def find_transfer(self, key: str) -> Transfer | None: ...

    def balance(self, account: str) -> int: ...

    def enter_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Append them and change the balances."""

    def open_hour(self) -> int:
        """The first hour whose units are not payable yet. It only rises."""

    def close_hours(self, until: int) -> None:
        """From now on `open_hour` is `until`."""

    def maturing(self, until: int) -> dict[str, int]:
        """By node, what was credited from `open_hour` to before `until`, without the units that are held or void."""


def post(books: LedgerBooks, transfer: Transfer) -> Transfer:
    """Enter a transfer once.

    Returns:
        What is in the books under its key.

    Raises:
        LedgerError: another transfer has the key, or an account would become negative that must not.
    """
    books.alone()
    before = books.find_transfer(transfer.key)
    if before is not None:
        if not before.same_as(transfer):
            raise LedgerError(f"transfer {transfer.key} is in the ledger already, with {before.legs}")
        return before
    for account, amount in transfer.legs:
        if amount < 0 and account not in MAY_BE_NEGATIVE and books.balance(account) + amount < 0:
            raise LedgerError(
                f"transfer {transfer.key}: {account} has {books.balance(account)} micro-credits, {-amount} are needed"
            )
    books.enter_transfers([transfer])
    return transfer


def legs_of(amounts: Mapping[str, int] | Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Sums by account, without those that are 0, in order of the accounts."""
    sums: dict[str, int] = {}
    for account, amount in amounts.items() if isinstance(amounts, Mapping) else amounts:
        sums[account] = sums.get(account, 0) + amount
    return tuple((account, sums[account]) for account in sorted(sums) if sums[account])
