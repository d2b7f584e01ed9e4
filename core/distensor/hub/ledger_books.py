"""What the hub asks of its store about money, beside what the ledger itself needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from distensor.core.ids import AccountId, JobId, NodeId
from distensor.hub.ledger.accounts import Policy
from distensor.hub.ledger.transfers import Kind, LedgerBooks, Transfer


class MoneyBooks(LedgerBooks, Protocol):
    """One transaction."""

    def policy(self) -> Policy:
        """What the operator decided last."""

    def save_policy(self, policy: Policy) -> None: ...

    def transfers_of(self, account: str) -> Iterable[Transfer]:
        """All of an account but those of units, oldest first."""

    def transfers_of_kind(self, kind: Kind) -> Iterable[Transfer]:
        """All of a kind other than UNIT, oldest first."""

    def account_balances(self, prefix: str = "") -> dict[str, int]:
        """Of all accounts that begin with `prefix` and have something, in their order."""

    def unit_sums(self, account: str, since_hour: int = 0) -> Sequence[tuple[int, str, str, int, int]]:
        """What units brought an account or took from it: hour, job, device, how many, micro-credits."""

    def open_units(self, job_id: str) -> int:
        """Micro-batches of the job's units of which only one side has said something yet."""

    def has_ended(self, job_id: str) -> bool | None:
        """Whether a job has ended; None: there is none."""

    def work_sum(self, account: str) -> tuple[int, int]:
        """What all units together brought an account or took from it, in micro-credits, and how many they are."""

    def job_sums(self, job_id: str) -> dict[str, int]:
        """By account, what the units of a job brought it or took from it."""

    def units_of_job(self, job_id: str) -> int:
        """How many units of a job were credited."""

    def nodes_of(self, account: str) -> Sequence[NodeId]:
        """The nodes of an account, in order of their ids."""

    def jobs_of(self, account: str) -> Sequence[JobId]:
        """The jobs of an account, oldest first."""

    def owner_of_node(self, node_id: str) -> AccountId | None: ...
