"""The ledger's operations. Each is one transfer with a key of its own, or nothing."""

from __future__ import annotations

from dataclasses import dataclass

from distensor.core.control import UnitKey
from distensor.core.errors import LedgerError
from distensor.hub.ledger.transfers import FEES, OUTSIDE, PLATFORM, Kind, LedgerBooks, Transfer, legs_of, post

PER_MILLE = 1000
DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the operator decided. By default nobody pays in: the platform lends what a job costs.

    Raises:
        LedgerError: a fee that is not from 0 to 999 of a thousand, or a negative window.
    """

    deposits: bool = False
    """Whether a job needs a deposit that covers its quote."""
    fee_per_mille: int = 0
    challenge_seconds: int = 2 * DAY

    def __post_init__(self) -> None:
        if not 0 <= self.fee_per_mille < PER_MILLE:
            raise LedgerError(f"fee_per_mille is {self.fee_per_mille}; expected 0 to {PER_MILLE - 1}")
        if self.challenge_seconds < 0:
            raise LedgerError(f"challenge_seconds is {self.challenge_seconds}; expected 0 or more")

    def fee_of(self, amount: int) -> int:
        """Rounded down: what is left over is the provider's."""
        return amount * self.fee_per_mille // PER_MILLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """What a job will cost its trainer at most, shown before it begins. The fee is within the total."""

    total: int
    fee: int

    @property
    def work(self) -> int:
        return self.total - self.fee


def quote(policy: Policy, *, steps: int, ranks: int, micro_batches: int, micro_per_micro_batch: int) -> Quote:
    """The price of a job: every rank of every step is a unit of its own, and the fee of each is rounded."""
    unit = micro_batches * micro_per_micro_batch
    return Quote(total=steps * ranks * unit, fee=steps * ranks * policy.fee_of(unit))


def trainer(name: str) -> str:
    return f"deposit:{name}"


def escrow(job_id: str) -> str:
    return f"escrow:{job_id}"


def pending(node_id: str) -> str:
    return f"pending:{node_id}"


def held(node_id: str) -> str:
    return f"held:{node_id}"


def payable(node_id: str) -> str:
    return f"payable:{node_id}"


def clearing(payout_id: str) -> str:
    return f"clearing:{payout_id}"


def unit_name(key: UnitKey) -> str:
    return f"{key.job_id}/{key.epoch}/{key.step}/{key.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The operations, under one policy, within one transaction. Every one may be repeated.

    Raises (all of them):
        LedgerError: the books forbid it; nothing has changed.
    """

    books: LedgerBooks
    policy: Policy

    def deposit(self, name: str, amount: int, *, receipt: str, at: int) -> Transfer:
        """Money that a trainer paid in, by the key of the bank's receipt."""
        _positive(amount, "a deposit")
        legs = legs_of({OUTSIDE: -amount, trainer(name): amount})
        return post(self.books, Transfer(key=f"deposit/{receipt}", kind=Kind.DEPOSIT, legs=legs, at=at))

    def begin_job(self, job_id: str, name: str, total: int, *, at: int) -> Transfer:
        """Set the quote aside. Without deposits the platform lends what is missing."""
        _positive(total, "a quote")
        key = f"escrow/{job_id}"
        if (before := self.books.find_transfer(key)) is not None:
            return before
        own = total if self.policy.deposits else min(total, self.books.balance(trainer(name)))
        legs = legs_of({trainer(name): -own, PLATFORM: own - total, escrow(job_id): total})
        return post(self.books, Transfer(key=key, kind=Kind.ESCROW, legs=legs, at=at, job_id=job_id))

    def credit(self, key: UnitKey, name: str, node_id: str, amount: int, *, at: int, device: str = "") -> Transfer:
        """A unit on which claim and receipt agree: out of the escrow, then the deposit, then the platform's loan.

        The work has been done and received, so it is paid even where the quote was too small: the trainer's deposit
        is taken as far as it goes, and the rest is the platform's risk, never the provider's.
        """
        _positive(amount, "a unit")
        name_of_key = f"unit/{unit_name(key)}"
        if (before := self.books.find_transfer(name_of_key)) is not None:
            return before
        aside = min(amount, self.books.balance(escrow(key.job_id)))
        own = min(amount - aside, self.books.balance(trainer(name)))
        fee = self.policy.fee_of(amount)
        legs = legs_of(
            {
                escrow(key.job_id): -aside,
                trainer(name): -own,
                PLATFORM: aside + own - amount,
                pending(node_id): amount - fee,
                FEES: fee,
            }
        )
        return post(
            self.books,
            Transfer(key=name_of_key, kind=Kind.UNIT, legs=legs, at=at, job_id=key.job_id, device=device),
        )

    def hold(self, key: UnitKey, node_id: str, *, at: int) -> Transfer:
        """A spot check disagrees: the unit's credit waits for a decision. Only before it is payable."""
        unit = self._unit(key)
        if self.books.find_transfer(f"mature/{unit_name(key)}") is not None:
            raise LedgerError(f"unit {unit_name(key)} is payable already and cannot be held")
        share = _share(unit, pending(node_id))
        legs = legs_of({pending(node_id): -share, held(node_id): share})
        return post(self.books, Transfer(key=f"hold/{unit_name(key)}", kind=Kind.HOLD, legs=legs, at=at))

    def decide(self, key: UnitKey, name: str, node_id: str, *, good: bool, at: int) -> Transfer:
        """The end of a hold: back to pending, or back to the trainer with the fee. One of the two, once."""
        unit = self._unit(key)
        if self.books.find_transfer(f"hold/{unit_name(key)}") is None:
            raise LedgerError(f"unit {unit_name(key)} is not held")
        share, fee = _share(unit, pending(node_id)), dict(unit.legs).get(FEES, 0)
        if good:
            kind, legs = Kind.RELEASE, legs_of({held(node_id): -share, pending(node_id): share})
        else:
            kind, legs = Kind.VOID, legs_of({held(node_id): -share, FEES: -fee, trainer(name): share + fee})
        return post(self.books, Transfer(key=f"decision/{unit_name(key)}", kind=kind, legs=legs, at=at))

    def mature(self, key: UnitKey, node_id: str, *, at: int) -> Transfer:
        """The challenge window is over: the credit is payable.

        Raises:
            LedgerError: the window is not over, or the unit is held or was voided.
        """
        unit = self._unit(key)
        due = unit.at + self.policy.challenge_seconds
        if at < due:
            raise LedgerError(f"unit {unit_name(key)} can be challenged for {due - at} s more")
        if self.books.find_transfer(f"hold/{unit_name(key)}") is not None:
            decision = self.books.find_transfer(f"decision/{unit_name(key)}")
            if decision is None or decision.kind is Kind.VOID:
                raise LedgerError(f"unit {unit_name(key)} is {'held' if decision is None else 'void'}")
        share = _share(unit, pending(node_id))
        legs = legs_of({pending(node_id): -share, payable(node_id): share})
        return post(self.books, Transfer(key=f"mature/{unit_name(key)}", kind=Kind.MATURE, legs=legs, at=at))

    def end_job(self, job_id: str, name: str, *, at: int) -> Transfer | None:
        """What is left of the escrow goes back where it came from: the platform's loan first. None: nothing is left.

        The same for a job that finished and for one that failed. Units that are credited later are taken from the
        deposit.
        """
        key = f"refund/{job_id}"
        if (before := self.books.find_transfer(key)) is not None:
            return before
        begun = self.books.find_transfer(f"escrow/{job_id}")
        rest = self.books.balance(escrow(job_id))
        if begun is None or rest == 0:
            return None
        loan = min(rest, -dict(begun.legs).get(PLATFORM, 0))
        legs = legs_of({escrow(job_id): -rest, PLATFORM: loan, trainer(name): rest - loan})
        return post(self.books, Transfer(key=key, kind=Kind.REFUND, legs=legs, at=at, job_id=job_id))

    def begin_payout(self, payout_id: str, node_id: str, amount: int, *, at: int) -> Transfer:
        """Set an amount aside before anybody is told to pay it."""
        _positive(amount, "a payout")
        legs = legs_of({payable(node_id): -amount, clearing(payout_id): amount})
        return post(self.books, Transfer(key=f"payout/{payout_id}", kind=Kind.PAYOUT, legs=legs, at=at))

    def end_payout(self, payout_id: str, *, paid: bool, at: int) -> Transfer:
        """What became of it. One of the two, once: the other answer is refused whenever it comes."""
        begun = self.books.find_transfer(f"payout/{payout_id}")
        if begun is None:
            raise LedgerError(f"payout {payout_id} was never begun")
        amount = dict(begun.legs)[clearing(payout_id)]
        source = next(account for account, change in begun.legs if change < 0)
        to = OUTSIDE if paid else source
        legs = legs_of({clearing(payout_id): -amount, to: amount})
        kind = Kind.PAID if paid else Kind.FAILED
        return post(self.books, Transfer(key=f"payout-end/{payout_id}", kind=kind, legs=legs, at=at))

    def _unit(self, key: UnitKey) -> Transfer:
        unit = self.books.find_transfer(f"unit/{unit_name(key)}")
        if unit is None:
            raise LedgerError(f"unit {unit_name(key)} was never credited")
        return unit


def _share(unit: Transfer, account: str) -> int:
    share = dict(unit.legs).get(account, 0)
    if share <= 0:
        raise LedgerError(f"{unit.key} brought nothing to {account}")
    return share


def _positive(amount: int, what: str) -> None:
    if amount <= 0:
        raise LedgerError(f"{what} is {amount} micro-credits; expected more than 0")
