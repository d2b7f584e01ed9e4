"""What the operator does to the ledger. Each is one transaction with its line in the audit log."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

from distensor.comm.keys import KeyKind
from distensor.core.errors import ConfigError, LedgerError
from distensor.core.ids import is_valid_name
from distensor.hub import objections
from distensor.hub.administration import Clerk, account_of
from distensor.hub.ledger.accounts import Ledger, Policy, payable
from distensor.hub.ledger.transfers import Transfer
from distensor.hub.ledger_queries import PayoutLine, payout_line
from distensor.hub.repository import Books

T = TypeVar("T")


def deposit(books: Books, clerk: Clerk, name: str, micro: int, key: str) -> Transfer:
    """Enter money that an account has paid in, by the key of its receipt. The same again changes nothing.

    Raises:
        ConfigError: there is no such account, it has no trainers, or another deposit has this key.
    """
    account = account_of(books, name)
    if KeyKind.TRAINER not in account.kinds:
        raise ConfigError(f"account {name} is for {', '.join(sorted(account.kinds))}; deposits are for trainers")
    _check_key(key)
    ledger, known = _ledger(books), books.find_transfer(f"deposit/{key}")
    transfer = _entered(lambda: ledger.deposit(name, micro, receipt=key, at=clerk.now))
    if known is None:
        clerk.write(books, "deposit", name, f"{micro} micro-credits by {key}")
    return transfer


def set_terms(books: Books, clerk: Clerk, policy: Policy) -> None:
    """What holds for jobs from now on; those that have begun keep their price and fee."""
    if policy != books.policy():
        books.save_policy(policy)
        clerk.write(books, "price", "hub", terms_text(policy))


def terms_text(policy: Policy) -> str:
    return (
        f"{policy.micro_per_micro_batch} micro-credits a micro-batch, fee {policy.fee_per_mille} of 1000, "
        f"payable after {policy.challenge_seconds / 3600:g} hours, "
        f"deposits {'required' if policy.deposits else 'not required'}"
    )


def make_payouts(
    books: Books, clerk: Clerk, name: str, micro: int | None = None, key: str | None = None
) -> tuple[PayoutLine, ...]:
    """Set aside what is payable to a node, or to each node of an account; whoever pays is told next.

    Args:
        micro: a part of it, for one node; all of it otherwise.
        key: the id of the payout, for one node; the same again is the same payout. A new one otherwise.

    Raises:
        ConfigError: there is no such node or account, nothing is payable, or less than `micro`.
    """
    nodes = [name] if books.owner_of_node(name) is not None else [*books.nodes_of(account_of(books, name).account_id)]
    if (micro is not None or key is not None) and len(nodes) != 1:
        raise ConfigError(f"account {name} has {len(nodes)} nodes: an amount or a key is for one node; name that")
    if key is not None:
        _check_key(key)
    books.alone()
    known = key is not None and books.find_transfer(f"payout/{key}") is not None
    due = [(node, books.balance(payable(node)) if micro is None else micro) for node in nodes]
    if not known:
        due = [(node, amount) for node, amount in due if amount > 0]
        if not due:
            raise ConfigError(f"nothing is payable to {name}; `distensor hub statement {name}` shows what is pending")
    elif micro is None:
        return (payout(books, str(key)),)
    return tuple(_begun(books, clerk, node, amount, key) for node, amount in due)


def _begun(books: Books, clerk: Clerk, node: str, micro: int, key: str | None) -> PayoutLine:
    payout_id = key or f"po_{uuid.uuid4().hex[:20]}"
    known = books.find_transfer(f"payout/{payout_id}")
    begun = _entered(lambda: _ledger(books).begin_payout(payout_id, node, micro, at=clerk.now))
    if known is None:
        clerk.write(books, "payout make", payout_id, f"{micro} micro-credits to {node}")
    return payout_line(books, begun)


def payout(books: Books, payout_id: str) -> PayoutLine:
    """Raises: ConfigError: there is no such payout."""
    begun = books.find_transfer(f"payout/{payout_id}")
    if begun is None:
        raise ConfigError(f"there is no payout {payout_id[:70]!r}; `distensor hub payout list` shows those that are")
    return payout_line(books, begun)


def end_payout(books: Books, clerk: Clerk, payout_id: str, *, paid: bool, reason: str = "") -> PayoutLine:
    """Enter what became of a payout. The same answer again changes nothing.

    Raises:
        ConfigError: there is no such payout, or the other answer was entered before.
    """
    payout(books, payout_id)
    known = books.find_transfer(f"payout-end/{payout_id}")
    _entered(lambda: _ledger(books).end_payout(payout_id, paid=paid, at=clerk.now))
    if known is None:
        clerk.write(books, "payout confirm" if paid else "payout fail", payout_id, reason)
    return payout(books, payout_id)


def decide(books: Books, clerk: Clerk, job_id: str, node_id: str, *, good: bool, reason: str = "") -> int:
    """End the hold of a node's work in a job, to which its trainer objects. Returns the micro-credits.

    Raises:
        ConfigError: nobody objects to it, or it has been decided.
    """
    waiting = [one for one in objections.held_work(books) if (one.job_id, one.node_id) == (job_id, node_id)]
    if not waiting:
        raise ConfigError(
            f"nothing of node {node_id[:70]!r} in job {job_id[:70]!r} is held; `distensor hub hold list` shows what is"
        )
    micro = _entered(lambda: objections.decide(books, job_id, node_id, good=good, at=clerk.now))
    action = "hold release" if good else "hold void"
    clerk.write(books, action, f"{job_id} {node_id}", f"{micro} micro-credits {reason}".strip())
    return micro


def _ledger(books: Books) -> Ledger:
    return Ledger(books=books, policy=books.policy())


def _entered(enter: Callable[[], T]) -> T:
    try:
        return enter()
    except LedgerError as error:
        raise ConfigError(str(error)) from error


def _check_key(key: str) -> None:
    if not is_valid_name(key):
        raise ConfigError(f"key {key[:70]!r}: expected 1 to 63 letters, digits, dots, dashes or underscores")
