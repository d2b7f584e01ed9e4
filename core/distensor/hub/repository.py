"""What the hub asks of its store. `stores` has it for SQLite and PostgreSQL; tests have one in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from distensor.core.control import Earnings, NodeInfo
from distensor.core.ids import Epoch, Generation, JobId, NodeId
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery
from distensor.hub.access_books import AccessBooks
from distensor.hub.metering import UnitBooks
from distensor.hub.objections import ObjectionBooks
from distensor.hub.records import JobRecord, NodeRecord, RankRecord, TokenRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a hub loads when it starts: all nodes, all live jobs, and the newest of those that ended."""

    nodes: tuple[NodeRecord, ...]
    jobs: tuple[JobRecord, ...]
    submissions: dict[tuple[str, str], tuple[JobId, Epoch]]
    """All that were ever made, by owner and submission: a repeated one is the same job for ever."""
    earnings: dict[NodeId, Earnings]


class Books(UnitBooks, AccessBooks, ObjectionBooks, Protocol):
    """One transaction."""

    def begin_generation(self) -> Generation:
        """One more than ever before."""

    def authority_mark(self) -> int | None:
        """A number that tells the authority of this hub from others; None before the first start."""

    def save_authority_mark(self, mark: int) -> None:
        """Once; a later one changes nothing."""

    def snapshot(self) -> Snapshot: ...

    def find_token(self, secret_hash: str) -> TokenRecord | None: ...

    def save_token(self, token: TokenRecord) -> None: ...

    def spend_token(self, node_id: NodeId) -> None:
        """The tokens that this node used cannot be used again."""

    def save_node(self, node: NodeRecord) -> None: ...

    def save_info(self, node_id: NodeId, info: NodeInfo) -> None:
        """What a known node says of itself; all else of it stays."""

    def insert_job(self, job: JobRecord) -> None: ...

    def find_job(self, job_id: JobId) -> JobRecord | None:
        """Also one that ended long ago."""

    def epochs_of(self, job_id: JobId) -> tuple[Epoch, ...]:
        """Those in which the job had ranks, the first one first."""

    def ranks_of(self, job_id: JobId, epoch: Epoch) -> tuple[RankRecord, ...]:
        """The ranks of any epoch, in order; none where there was no such epoch."""

    def update_job(self, job: JobRecord) -> None:
        """State and reason only; ranks have their own rows."""

    def begin_epoch(self, job: JobRecord) -> None:
        """The job's next epoch, with its ranks; those of earlier epochs stay where units are found by them."""

    def save_rank(self, job_id: JobId, epoch: Epoch, rank: RankRecord) -> None: ...

    def statement(self, node_id: NodeId, query: StatementQuery) -> Statement:
        """What the node's account was credited, by hour and rank; `earnings` are those of the same transaction."""

    def units(self, node_id: NodeId, query: UnitsQuery) -> UnitsPage:
        """The units of one rank that are the node's, by step."""


class Store(Protocol):
    """Where the books are. One thread writes at a time, another one may read meanwhile."""

    def transaction(self) -> AbstractContextManager[Books]:
        """Commits at the end of the block, with everything on the disk, or rolls all of it back.

        Raises:
            StoreError: nothing was committed. Trying again may help (a full disk) or not.
        """

    def part(self) -> AbstractContextManager[None]:
        """A part of the present transaction that is rolled back alone when its block raises."""

    def reading(self) -> AbstractContextManager[Books]:
        """What is committed, as of one moment. Goes on while nothing can be written; a change is an error.

        Raises:
            StoreError: the database does not answer.
        """

    def give_up(self) -> None:
        """From any thread: a transaction that waits for a database that is away ends with StoreError."""

    def close(self) -> None: ...
