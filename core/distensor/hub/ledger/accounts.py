"""The ledger's operations. Each is one transfer with a key of its own, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distensor.core.control import UnitKey
from distensor.core.errors import LedgerError
from distensor.core.statement import HOUR_SECONDS
from distensor.hub.ledger.transfers import OUTSIDE, PLATFORM, Kind, LedgerBooks, Transfer, legs_of, post

PER_MILLE = 1000
DAY = 86_400
MICRO_PER_MICRO_BATCH = 1000
"""The price of one micro-batch on one rank, where the operator has set no other."""
LARGEST_PRICE = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the operator decided. By default nobody pays in: the platform lends what a job costs.

    Raises:
        LedgerError: a fee that is not from 0 to 999 of a thousand, a negative window, or a price that is none.
    """

    deposits: bool = False
    """Whether a job needs a deposit that covers its quote."""
    fee_per_mille: int = 0
    challenge_seconds: int = 2 * DAY
    micro_per_micro_batch: int = MICRO_PER_MICRO_BATCH
    """What one micro-batch on one rank costs, the fee within it."""

    def __post_init__(self) -> None:
        if not 0 <= self.fee_per_mille < PER_MILLE:
            raise LedgerError(f"fee_per_mille is {self.fee_per_mille}; expected 0 to {PER_MILLE - 1}")
        if self.challenge_seconds < 0:
            raise LedgerError(f"challenge_seconds is {self.challenge_seconds}; expected 0 or more")
        if not 1 <= self.micro_per_micro_batch <= LARGEST_PRICE:
            raise LedgerError(f"micro_per_micro_batch is {self.micro_per_micro_batch}; expected 1 to {LARGEST_PRICE}")

    def fee_of(self, amount: int) -> int:
        return fee_of(amount, self.fee_per_mille)


def fee_of(amount: int, per_mille: int) -> int:
    """Rounded down: what is left over is the provider's."""
    return amount * per_mille // PER_MILLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Quote:
    """What a job will cost its trainer at most, shown before it begins. The fee is within the total."""

    total: int
    fee: int

    @property
    def work(self) -> int:
        return self.total - self.fee


def quote(policy: Policy, *, steps: int, ranks: int, micro_batches: int) -> Quote:
    """The price of a job: every rank of every step is a unit of its own, and the fee of each is rounded."""
    unit = micro_batches * policy.micro_per_micro_batch
    return Quote(total=steps * ranks * unit, fee=steps * ranks * policy.fee_of(unit))


def trainer(name: str) -> str:
    return f"deposit:{name}"


def is_deposit(account: str) -> bool:
    return account.startswith("deposit:")


def escrow(job_id: str) -> str:
    return f"escrow:{job_id}"


def pending(node_id: str) -> str:
    return f"pending:{node_id}"


def held(node_id: str) -> str:
    return f"held:{node_id}"


def payable(node_id: str) -> str:
    return f"payable:{node_id}"


def fees(node_id: str) -> str:
    """The platform's own, kept apart by whose work brought it."""
    return f"fees:{node_id}"


def held_fees(node_id: str) -> str:
    """The fee of work that is held."""
    return f"held-fees:{node_id}"


def clearing(payout_id: str) -> str:
    return f"clearing:{payout_id}"


def unit_name(key: UnitKey) -> str:
    return f"{key.job_id}/{key.epoch}/{key.step}/{key.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """A unit on which claim and receipt agree. The fee is within the amount."""

    key: UnitKey
    trainer: str
    node_id: str
    amount: int
    fee: int
    at: int
    device: str = ""


def credited(credits_: Iterable[Credit], balance: Callable[[str], int]) -> list[Transfer]:
    """The transfers of new units, in order: out of the escrow, then the deposit, then the platform's loan.

    The work has been done and received, so it is paid even where the quote was too small: the trainer's deposit
    is taken as far as it goes, and the rest is the platform's risk, never the provider's.
    """
    left: dict[str, int] = {}

    def take(account: str, most: int) -> int:
        if account not in left:
            left[account] = balance(account)
        taken = min(most, left[account])
        left[account] -= taken
        return taken

    transfers = []
    for one in credits_:
        aside = take(escrow(one.key.job_id), one.amount)
        own = take(trainer(one.trainer), one.amount - aside)
        legs = {
            escrow(one.key.job_id): -aside,
            trainer(one.trainer): -own,
            PLATFORM: aside + own - one.amount,
            pending(one.node_id): one.amount - one.fee,
            fees(one.node_id): one.fee,
        }
        transfers.append(
            Transfer(
                key=f"unit/{unit_name(one.key)}",
                kind=Kind.UNIT,
                legs=legs_of(legs),
                at=one.at,
                job_id=one.key.job_id,
                device=one.device,
                hour=one.at // HOUR_SECONDS,
            )
        )
    return transfers


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
        """A unit on which claim and receipt agree; see `credited`."""
        _positive(amount, "a unit")
        self.books.alone()
        if (before := self.books.find_transfer(f"unit/{unit_name(key)}")) is not None:
            return before
        at = max(at, self.books.open_hour() * HOUR_SECONDS)  # else no hour to come would make it payable
        fee = self.policy.fee_of(amount)
        one = Credit(key=key, trainer=name, node_id=node_id, amount=amount, fee=fee, at=at, device=device)
        (transfer,) = credited([one], self.books.balance)
        self.books.enter_transfers([transfer])
        return transfer

    def hold(self, key: UnitKey, node_id: str, *, at: int) -> Transfer:
        """A spot check disagrees: the unit's credit waits for a decision. Only before it is payable."""
        unit = self._unit(key)
        name = f"hold/{unit_name(key)}"
        if (before := self.books.find_transfer(name)) is not None:
            return before
        hour = unit.at // HOUR_SECONDS
        if hour < self.books.open_hour():
            raise LedgerError(f"unit {unit_name(key)} is payable already and cannot be held")
        share = _share(unit, pending(node_id))
        legs = legs_of({pending(node_id): -share, held(node_id): share})
        return post(self.books, Transfer(key=name, kind=Kind.HOLD, legs=legs, at=at, job_id=unit.job_id, hour=hour))

    def decide(self, key: UnitKey, name: str, node_id: str, *, good: bool, at: int) -> Transfer:
        """The end of a hold: back to where the unit would be without it, or back to the trainer with the fee.

        One of the two, once.
        """
        unit = self._unit(key)
        if self.books.find_transfer(f"hold/{unit_name(key)}") is None:
            raise LedgerError(f"unit {unit_name(key)} is not held")
        kind = Kind.RELEASE if good else Kind.VOID
        key_of_it = f"decision/{unit_name(key)}"
        if (before := self.books.find_transfer(key_of_it)) is not None and before.kind is kind:
            return before
        share, fee = _share(unit, pending(node_id)), dict(unit.legs).get(fees(node_id), 0)
        hour = unit.at // HOUR_SECONDS
        back = payable(node_id) if hour < self.books.open_hour() else pending(node_id)
        legs = legs_of(
            {held(node_id): -share, back: share}
            if good
            else {held(node_id): -share, fees(node_id): -fee, trainer(name): share + fee}
        )
        return post(self.books, Transfer(key=key_of_it, kind=kind, legs=legs, at=at, job_id=unit.job_id, hour=hour))

    def may_mature(self, *, at: int) -> bool:
        """Whether there are hours whose challenge window is over and that are not closed yet."""
        return self._closing(at) > self.books.open_hour()

    def _closing(self, at: int) -> int:
        return (at - self.policy.challenge_seconds) // HOUR_SECONDS

    def mature(self, *, at: int) -> tuple[Transfer, ...]:
        """Make payable what was credited in the hours whose challenge window is over: one transfer for each node.

        Hours are taken whole, so a unit waits up to an hour longer than the window.
        """
        until = self._closing(at)
        self.books.alone()
        if until <= self.books.open_hour():
            return ()
        transfers = tuple(
            Transfer(
                key=f"mature/{node_id}/{until}",
                kind=Kind.MATURE,
                legs=legs_of({pending(node_id): -amount, payable(node_id): amount}),
                at=at,
            )
            for node_id, amount in sorted(self.books.maturing(until).items())
            if amount
        )
        self.books.enter_transfers(transfers)
        self.books.close_hours(until)
        return transfers

    def end_job(self, job_id: str, *, at: int, keep: int = 0) -> Transfer | None:
        """What is left of the escrow goes back where it came from: the platform's loan first. None: nothing goes back.

        The same for a job that finished and for one that failed. `keep` stays for units of which only one side has
        said something yet; `close_job` gives it back. Units that are credited after that are taken from the deposit.
        """
        return self._give_back(job_id, f"refund/{job_id}", at=at, keep=keep)

    def close_job(self, job_id: str, *, at: int) -> Transfer | None:
        """What `end_job` kept and nobody got goes back too."""
        return self._give_back(job_id, f"refund-rest/{job_id}", at=at, keep=0)

    def _give_back(self, job_id: str, key: str, *, at: int, keep: int) -> Transfer | None:
        self.books.alone()
        if (before := self.books.find_transfer(key)) is not None:
            return before
        begun = self.books.find_transfer(f"escrow/{job_id}")
        back = self.books.balance(escrow(job_id)) - keep
        if begun is None or back <= 0:
            return None
        ended = self.books.find_transfer(f"refund/{job_id}")
        returned = 0 if ended is None else dict(ended.legs).get(PLATFORM, 0)
        loan = min(back, -dict(begun.legs).get(PLATFORM, 0) - returned)
        amounts = {escrow(job_id): -back, PLATFORM: loan}
        amounts |= {account: back - loan for account, _ in begun.legs if is_deposit(account)}
        return post(self.books, Transfer(key=key, kind=Kind.REFUND, legs=legs_of(amounts), at=at, job_id=job_id))

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
