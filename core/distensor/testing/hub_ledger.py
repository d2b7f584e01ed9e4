"""The ledger's books in memory."""

from __future__ import annotations

from collections import Counter

from distensor.hub.ledger.transfers import Transfer


class MemoryLedger:
    """A `LedgerBooks`; `transfers` are all of them, by key, in order."""

    def __init__(self) -> None:
        self.transfers: dict[str, Transfer] = {}
        self.balances: Counter[str] = Counter()

    def find_transfer(self, key: str) -> Transfer | None:
        return self.transfers.get(key)

    def balance(self, account: str) -> int:
        return self.balances[account]

    def enter_transfer(self, transfer: Transfer) -> None:
        if transfer.key in self.transfers:
            raise ValueError(f"{transfer.key} is in the ledger already")
        self.transfers[transfer.key] = transfer
        for account, amount in transfer.legs:
            self.balances[account] += amount
