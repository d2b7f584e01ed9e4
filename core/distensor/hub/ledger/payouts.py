"""Paying out: the ledger sets an amount aside, an adapter pays, its answer ends the payout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from distensor.hub.ledger.accounts import Ledger


class PayoutState(StrEnum):
    SENT = "sent"
    PAID = "paid"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Payout:
    """An order to pay. Its id is the key that the other side keeps, so the same order twice is one payment."""

    payout_id: str
    node_id: str
    micro: int


class PayoutAdapter(Protocol):
    """Whoever moves the money. Both calls may be repeated."""

    def send(self, payout: Payout) -> PayoutState: ...

    def ask(self, payout_id: str) -> PayoutState: ...


class ManualAdapter:
    """The operator pays by hand and says so: `settled` knows what was said of a payout."""

    def __init__(self, settled: Callable[[str], PayoutState | None]) -> None:
        self._settled = settled

    def send(self, payout: Payout) -> PayoutState:
        return self.ask(payout.payout_id)

    def ask(self, payout_id: str) -> PayoutState:
        return self._settled(payout_id) or PayoutState.SENT


def advance(ledger: Ledger, adapter: PayoutAdapter, payout: Payout, *, at: int) -> PayoutState:
    """Lead a payout on: aside in the ledger, then to the adapter, then its answer into the ledger.

    The caller commits after `Ledger.begin_payout` and before the adapter is told, so that no money moves which the
    ledger does not know. Called again after any failure, it goes on where it was.

    Raises:
        LedgerError: there is not enough, or the answer contradicts one that was entered before.
    """
    ended = ledger.books.find_transfer(f"payout-end/{payout.payout_id}")
    if ended is not None:
        return PayoutState(ended.kind.value)
    ledger.begin_payout(payout.payout_id, payout.node_id, payout.micro, at=at)
    state = adapter.send(payout)
    if state is not PayoutState.SENT:
        ledger.end_payout(payout.payout_id, paid=state is PayoutState.PAID, at=at)
    return state
