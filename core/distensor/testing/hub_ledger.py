"""The ledger's books in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from distensor.core.control import UnitKey
from distensor.core.statement import HOUR_SECONDS
from distensor.hub.ledger.accounts import Policy, credited
from distensor.hub.ledger.transfers import Kind, Transfer
from distensor.hub.metering import Posting
from distensor.hub.objections import WORK, Objection


class MemoryLedger:
    """A `LedgerBooks`; `transfers` are all of them, by key, in order."""

    def __init__(self) -> None:
        self.transfers: dict[str, Transfer] = {}
        self.balances: Counter[str] = Counter()
        self.opened = 0
        self.objections: dict[UnitKey, tuple[Objection, str]] = {}
        self.policy = Policy()

    def copied(self) -> MemoryLedger:
        """Transfers are frozen, so copies of the tables are enough."""
        copy = MemoryLedger()
        copy.transfers, copy.balances, copy.opened = dict(self.transfers), Counter(self.balances), self.opened
        copy.policy, copy.objections = self.policy, dict(self.objections)
        return copy

    def alone(self) -> None:
        """Nobody else is there."""

    def find_transfer(self, key: str) -> Transfer | None:
        return self.transfers.get(key)

    def balance(self, account: str) -> int:
        return self.balances[account]

    def enter_transfers(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer.key in self.transfers:
                raise ValueError(f"{transfer.key} is in the ledger already")
            self.transfers[transfer.key] = transfer
            for account, amount in transfer.legs:
                self.balances[account] += amount

    def open_hour(self) -> int:
        return self.opened

    def close_hours(self, until: int) -> None:
        self.opened = until

    def maturing(self, until: int) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for unit in self.transfers.values():
            if unit.kind is Kind.UNIT and self.opened <= unit.at // HOUR_SECONDS < until and not self._out(unit):
                for account, amount in unit.legs:
                    owner, _, node_id = account.partition(":")
                    if owner == "pending":
                        sums[node_id] += amount
        for hold in self.transfers.values():
            if hold.key.startswith(WORK) and self.opened <= hold.hour < until and not self._released(hold):
                for account, amount in hold.legs:
                    if account.startswith("pending:"):
                        sums[account.partition(":")[2]] += amount
        return dict(sums)

    def _released(self, hold: Transfer) -> bool:
        decision = self.transfers.get(f"decision/{hold.key.removeprefix('hold/')}")
        return decision is not None and decision.kind is Kind.RELEASE

    def _out(self, unit: Transfer) -> bool:
        """Held, or void."""
        name = unit.key.removeprefix("unit/")
        decision = self.transfers.get(f"decision/{name}")
        return f"hold/{name}" in self.transfers and (decision is None or decision.kind is Kind.VOID)


class MemoryLedgerBooks:
    """The ledger's part of a `MemoryBooks`."""

    @property
    @abstractmethod
    def _money(self) -> MemoryLedger: ...

    @abstractmethod
    def device_of(self, unit: Transfer) -> str: ...

    def alone(self) -> None:
        """Nobody else is there."""

    def find_transfer(self, key: str) -> Transfer | None:
        return self._money.find_transfer(key)

    def balance(self, account: str) -> int:
        return self._money.balance(account)

    def enter_transfers(self, transfers: Sequence[Transfer]) -> None:
        self._money.enter_transfers(transfers)

    def post(self, postings: Iterable[Posting]) -> None:
        self.enter_transfers(credited([one.as_credit() for one in postings], self.balance))

    def open_hour(self) -> int:
        return self._money.open_hour()

    def close_hours(self, until: int) -> None:
        self._money.close_hours(until)

    def maturing(self, until: int) -> dict[str, int]:
        return self._money.maturing(until)

    def policy(self) -> Policy:
        return self._money.policy

    def save_policy(self, policy: Policy) -> None:
        self._money.policy = policy

    def transfers_of(self, account: str) -> Iterator[Transfer]:
        return (
            one for one in self._money.transfers.values() if one.kind is not Kind.UNIT and account in dict(one.legs)
        )

    def transfers_of_kind(self, kind: Kind) -> Iterator[Transfer]:
        return (one for one in self._money.transfers.values() if one.kind is kind)

    def save_objection(self, objection: Objection) -> None:
        self._money.objections.setdefault(objection.key, (objection, ""))

    def objections(self) -> list[Objection]:
        found = [one for one, decision in self._money.objections.values() if not decision]
        return sorted(found, key=lambda one: (one.at, one.key.job_id, one.key.epoch, one.key.step, one.key.rank))

    def decide_objections(self, job_id: str, node_id: str, decision: str) -> None:
        for key, (one, before) in self._money.objections.items():
            if (key.job_id, one.node_id, before) == (job_id, node_id, ""):
                self._money.objections[key] = (one, decision)

    def account_balances(self, prefix: str = "") -> dict[str, int]:
        return {
            account: amount
            for account, amount in sorted(self._money.balances.items())
            if amount and account.startswith(prefix)
        }

    def unit_sums(self, account: str, since_hour: int = 0) -> list[tuple[int, str, str, int, int]]:
        sums: dict[tuple[int, str, str], tuple[int, int]] = {}
        for one in self._money.transfers.values():
            amount = dict(one.legs).get(account, 0)
            if one.kind is Kind.UNIT and amount and one.hour >= since_hour:
                key = (one.hour, one.job_id, self.device_of(one))
                units, micro = sums.get(key, (0, 0))
                sums[key] = (units + 1, micro + amount)
        return [(*key, *sums[key]) for key in sorted(sums)]

    def work_sum(self, account: str) -> tuple[int, int]:
        brought = [
            amount
            for one in self._money.transfers.values()
            if one.kind is Kind.UNIT and (amount := dict(one.legs).get(account))
        ]
        return sum(brought), len(brought)

    def job_sums(self, job_id: str) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for one in self._units_of(job_id):
            for account, amount in one.legs:
                sums[account] += amount
        return dict(sorted(sums.items()))

    def units_of_job(self, job_id: str) -> int:
        return len(self._units_of(job_id))

    def _units_of(self, job_id: str) -> list[Transfer]:
        return [one for one in self._money.transfers.values() if one.kind is Kind.UNIT and one.job_id == job_id]
