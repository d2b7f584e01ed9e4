"""Leading payouts from the ledger to the service and back: committed before it is told, entered once it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from distensor.hub.ledger.accounts import Ledger, clearing
from distensor.hub.ledger.payouts import Payout, PayoutAdapter, PayoutState

T = TypeVar("T")


class Entering(Protocol):
    """Runs a function on the ledger within one transaction."""

    def __call__(self, run: Callable[[Ledger], T], /) -> T:
        """Returns once the changes are on the disk; a function that raises leaves none."""


class PayoutDesk:
    """Leads payouts, one at a time: who asks about one while another is led waits for it."""

    def __init__(self, enter: Entering, adapter: PayoutAdapter) -> None:
        self._enter = enter
        self._adapter = adapter
        self._lock = threading.Lock()

    def lead(self, payout: Payout, *, at: int) -> PayoutState:
        """Lead a payout on, whatever became of an earlier call. Whoever is killed anywhere here calls again.

        No transaction is open while the service is asked.

        Raises:
            LedgerError: there is not enough to set aside, or the payout is not as it was begun.
            PayoutError: the service knows another payment under the same id.
        """
        with self._lock:
            known = self._enter(lambda ledger: _begin(ledger, payout, at))
            if known is not PayoutState.SENT:
                return known
            state = self._adapter.send(payout)
            if state is not PayoutState.SENT:
                self._enter(lambda ledger: ledger.end_payout(payout.payout_id, paid=state is PayoutState.PAID, at=at))
            return state

    def hear(self, payout_id: str, *, at: int) -> PayoutState | None:
        """Somebody hints that something became of a payout: look, and enter what is so. None: there is no such payout.

        Raises:
            PayoutError: as `lead` does.
        """
        payout = self._enter(lambda ledger: begun(ledger, payout_id))
        if payout is None:
            return None
        known = self._enter(lambda ledger: known_state(ledger, payout_id))
        if known is not PayoutState.SENT or self._adapter.ask(payout_id) is PayoutState.SENT:
            return known
        return self.lead(payout, at=at)


def known_state(ledger: Ledger, payout_id: str) -> PayoutState | None:
    """What the ledger says of a payout; None where it was never begun."""
    ended = ledger.books.find_transfer(f"payout-end/{payout_id}")
    if ended is not None:
        return PayoutState(ended.kind.value)
    return None if ledger.books.find_transfer(f"payout/{payout_id}") is None else PayoutState.SENT


def begun(ledger: Ledger, payout_id: str) -> Payout | None:
    """The order as it was set aside; None where it never was."""
    transfer = ledger.books.find_transfer(f"payout/{payout_id}")
    if transfer is None:
        return None
    amount = dict(transfer.legs)[clearing(payout_id)]
    source = next(account for account, change in transfer.legs if change < 0)
    return Payout(payout_id=payout_id, node_id=source.partition(":")[2], micro=amount)


def _begin(ledger: Ledger, payout: Payout, at: int) -> PayoutState:
    ledger.begin_payout(payout.payout_id, payout.node_id, payout.micro, at=at)  # the same again changes nothing
    return known_state(ledger, payout.payout_id) or PayoutState.SENT
