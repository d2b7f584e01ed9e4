"""What a job's life and the time do to the ledger. Functions on the books, within the hub's own transactions."""

from __future__ import annotations

from distensor.core.control import JobSpec, Terms
from distensor.core.errors import PlacementError
from distensor.hub.ledger.accounts import Ledger, Policy, Quote, escrow, quote, trainer
from distensor.hub.ledger.transfers import Transfer
from distensor.hub.ledger_books import MoneyBooks
from distensor.hub.objections import ObjectionBooks, hold_all

ESCROW = escrow("")


def quote_of(policy: Policy, spec: JobSpec) -> Quote | None:
    """What a job will cost at most; None where it does not say how much it will compute."""
    if spec.steps == 0 or spec.micro_batches == 0:
        return None
    return quote(policy, steps=spec.steps, ranks=spec.parallel.world_size, micro_batches=spec.micro_batches)


def terms_of(policy: Policy) -> Terms:
    """What trainers are told of it."""
    return Terms(price=policy.micro_per_micro_batch, fee_per_mille=policy.fee_per_mille, deposits=policy.deposits)


def begin_job(books: MoneyBooks, job_id: str, owner: str, spec: JobSpec, at: int) -> Policy:
    """Set a job's quote aside before it is placed.

    Returns:
        The terms that hold for the job to its end.

    Raises:
        PlacementError: deposits are demanded, and there is no quote or the deposit does not cover it.
    """
    policy = books.policy()
    price = quote_of(policy, spec)
    if price is None:
        if policy.deposits:
            raise PlacementError(
                f"this hub demands deposits, and job {spec.name!r} does not say how many steps it will take at most: "
                "without that it cannot be quoted; set DISTENSOR_STEPS"
            )
        return policy
    books.alone()
    if policy.deposits and (there := books.balance(trainer(owner))) < price.total:
        raise PlacementError(
            f"job {spec.name!r} is quoted {price.total} micro-credits ({spec.steps} steps x "
            f"{spec.parallel.world_size} ranks x {spec.micro_batches} micro-batches x {policy.micro_per_micro_batch}); "
            f"the deposit of {owner} has {there}, {price.total - there} more are needed"
        )
    Ledger(books=books, policy=policy).begin_job(job_id, owner, price.total, at=at)
    return policy


def end_job(books: MoneyBooks, job_id: str, price: int, at: int) -> None:
    """Give back what is left of a job's escrow, but for units of which only one side has said something yet."""
    if books.balance(escrow(job_id)) > 0:
        keep = books.open_units(job_id) * price
        Ledger(books=books, policy=books.policy()).end_job(job_id, at=at, keep=keep)


def give_back(books: MoneyBooks, job_id: str, at: int) -> None:
    """A job that was not placed after all."""
    Ledger(books=books, policy=books.policy()).end_job(job_id, at=at)


def give_back_orphans(books: MoneyBooks, at: int) -> None:
    """For a hub that starts: money that was set aside for jobs which the one before did not come to place."""
    for job_id in _escrows(books):
        if books.has_ended(job_id) is None:
            give_back(books, job_id, at)


def settle(books: ObjectionBooks, at: int) -> tuple[Transfer, ...]:
    """What time does: credits become payable, and escrows of ended jobs go back. Nothing where it is too early.

    Returns:
        The credits that became payable, one transfer for each node.
    """
    before = books.open_hour()
    ledger = Ledger(books=books, policy=books.policy())
    if ledger.may_mature(at=at):
        hold_all(books, at=at)
    matured = ledger.mature(at=at)
    if books.open_hour() > before:
        for job_id in _escrows(books):
            if books.has_ended(job_id) and _since(books, job_id) + ledger.policy.challenge_seconds <= at:
                ledger.close_job(job_id, at=at)
    return matured


def settled(books: ObjectionBooks, at: int) -> tuple[tuple[Transfer, ...], Terms]:
    """What `settle` gives, and the present terms."""
    return settle(books, at), terms_of(books.policy())


def _escrows(books: MoneyBooks) -> list[str]:
    return [account.removeprefix(ESCROW) for account, amount in books.account_balances(ESCROW).items() if amount > 0]


def _since(books: MoneyBooks, job_id: str) -> int:
    """When the job's escrow was last touched by its end, or else by its beginning."""
    last = books.find_transfer(f"refund/{job_id}") or books.find_transfer(f"escrow/{job_id}")
    return 0 if last is None else last.at
