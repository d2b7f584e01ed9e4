"""The hub's books in memory, for tests and the simulator: the promises of the databases, and a fault to plant."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from distensor.core.control import Earnings, NodeInfo, UnitKey
from distensor.core.errors import StoreError
from distensor.core.ids import AccountId, DeviceId, Epoch, Generation, JobId, NodeId, Rank
from distensor.core.statement import (
    HubUnit,
    RowKey,
    Statement,
    StatementQuery,
    StatementRow,
    UnitsPage,
    UnitsQuery,
    UnitState,
)
from distensor.hub.ledger.accounts import pending, unit_name
from distensor.hub.ledger.transfers import Kind, Transfer
from distensor.hub.ledger_queries import node_money
from distensor.hub.metering import PlaceOfWork, UnitRecord
from distensor.hub.records import JobRecord, NodeRecord, RankRecord, TokenRecord
from distensor.hub.repository import Snapshot
from distensor.testing.hub_access_store import AccessTables, MemoryAccessBooks
from distensor.testing.hub_ledger import MemoryLedger, MemoryLedgerBooks


@dataclass(slots=True)
class _Tables:
    generation: int = 0
    authority: int | None = None
    tokens: dict[str, TokenRecord] = field(default_factory=dict)
    nodes: dict[NodeId, NodeRecord] = field(default_factory=dict)
    jobs: dict[JobId, JobRecord] = field(default_factory=dict)
    ranks: dict[tuple[JobId, Epoch, Rank], RankRecord] = field(default_factory=dict)
    units: dict[UnitKey, UnitRecord] = field(default_factory=dict)
    money: MemoryLedger = field(default_factory=MemoryLedger)
    access: AccessTables = field(default_factory=AccessTables)

    def copied(self) -> _Tables:
        """The records are frozen, so copies of the tables are enough."""
        return _Tables(
            generation=self.generation,
            authority=self.authority,
            access=self.access.copied(),
            money=self.money.copied(),
            **{name: copy.copy(getattr(self, name)) for name in ("tokens", "nodes", "jobs", "ranks", "units")},
        )


class MemoryStore:
    """A `distensor.hub.repository.Store`. `failures` is how many of the next commits fail, as on a full disk."""

    def __init__(self) -> None:
        self.tables = _Tables()
        self.failures = 0
        self._working: _Tables | None = None

    @contextmanager
    def transaction(self) -> Iterator[MemoryBooks]:
        self._working = self.tables.copied()
        books = MemoryBooks(self)
        yield books
        if self.failures > 0:
            self.failures -= 1
            raise StoreError("memory store: a planted failure")
        self.tables = self._working

    @contextmanager
    def part(self) -> Iterator[None]:
        before = self.working.copied()
        try:
            yield
        except BaseException:  # whatever it was, nothing of the part stays; it goes on upwards
            self._working = before
            raise

    @property
    def working(self) -> _Tables:
        assert self._working is not None, "outside of a transaction"
        return self._working

    @contextmanager
    def reading(self) -> Iterator[MemoryBooks]:
        """What is committed. Changes that are made in it are lost."""
        aside = MemoryStore()
        aside._working = self.tables.copied()
        yield MemoryBooks(aside)

    def give_up(self) -> None:
        """Memory is always there."""

    def close(self) -> None:
        self._working = None


class MemoryBooks(MemoryAccessBooks, MemoryLedgerBooks):
    """One transaction of a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def _tables(self) -> _Tables:
        return self._store.working

    @property
    def _access(self) -> AccessTables:
        return self._tables.access

    @property
    def _money(self) -> MemoryLedger:
        return self._tables.money

    def begin_generation(self) -> Generation:
        self._tables.generation += 1
        return Generation(self._tables.generation)

    def snapshot(self) -> Snapshot:
        jobs = self._tables.jobs
        return Snapshot(
            nodes=tuple(self._tables.nodes.values()),
            jobs=tuple(sorted(jobs.values(), key=lambda job: job.state.ended)),
            submissions={(job.owner, job.submission): (job.job_id, job.epoch) for job in jobs.values()},
            earnings={node_id: self.earnings(node_id) for node_id in self._tables.nodes},
        )

    def authority_mark(self) -> int | None:
        return self._tables.authority

    def save_authority_mark(self, mark: int) -> None:
        if self._tables.authority is None:
            self._tables.authority = mark

    def find_token(self, secret_hash: str) -> TokenRecord | None:
        return self._tables.tokens.get(secret_hash)

    def save_token(self, token: TokenRecord) -> None:
        self._tables.tokens[token.secret_hash] = token

    def spend_token(self, node_id: NodeId) -> None:
        for token in list(self._tables.tokens.values()):
            if token.used_by == node_id:
                self.save_token(replace(token, spent=True))

    def save_node(self, node: NodeRecord) -> None:
        self._tables.nodes[node.node_id] = node

    def save_info(self, node_id: NodeId, info: NodeInfo) -> None:
        self._tables.nodes[node_id] = replace(self._tables.nodes[node_id], info=info)

    def insert_job(self, job: JobRecord) -> None:
        taken = {(other.owner, other.submission) for other in self._tables.jobs.values()}
        if job.job_id in self._tables.jobs or (job.owner, job.submission) in taken:
            raise ValueError(f"job {job.job_id} or its submission {job.submission!r} is there already")
        self.begin_epoch(job)

    def begin_epoch(self, job: JobRecord) -> None:
        self._tables.jobs[job.job_id] = job
        self._tables.ranks |= {(job.job_id, job.epoch, rank.rank): rank for rank in job.ranks}

    def find_job(self, job_id: JobId) -> JobRecord | None:
        return self._tables.jobs.get(job_id)

    def epochs_of(self, job_id: JobId) -> tuple[Epoch, ...]:
        return tuple(sorted({epoch for one, epoch, _ in self._tables.ranks if one == job_id}))

    def ranks_of(self, job_id: JobId, epoch: Epoch) -> tuple[RankRecord, ...]:
        job = self._tables.jobs.get(job_id)
        if job is not None and job.epoch == epoch:
            return job.ranks  # with the newest news
        found = (rank for key, rank in self._tables.ranks.items() if key[:2] == (job_id, epoch))
        return tuple(sorted(found, key=lambda rank: rank.rank))

    def update_job(self, job: JobRecord) -> None:
        known = self._tables.jobs[job.job_id]
        self._tables.jobs[job.job_id] = replace(
            known, state=job.state, reason=job.reason, driver_certificate_pem=job.driver_certificate_pem
        )

    def save_rank(self, job_id: JobId, epoch: Epoch, rank: RankRecord) -> None:
        job = self._tables.jobs[job_id]
        if job.epoch == epoch:
            self._tables.jobs[job_id] = job.with_rank(rank)

    def find_place(self, job_id: JobId, epoch: Epoch, rank: Rank) -> PlaceOfWork | None:
        place = self._tables.ranks.get((job_id, epoch, rank))
        if place is None:
            return None
        job = self._tables.jobs[job_id]
        return PlaceOfWork(owner=job.owner, node_id=place.node_id, price=job.price, fee_per_mille=job.fee_per_mille)

    def find_units(self, keys: Iterable[UnitKey]) -> dict[UnitKey, UnitRecord]:
        return {key: self._tables.units[key] for key in keys if key in self._tables.units}

    def save_units(self, units: Iterable[UnitRecord]) -> None:
        self._tables.units |= {unit.key: unit for unit in units}

    def earnings(self, node_id: NodeId) -> Earnings:
        mine = [micro for unit in self._credited() if (micro := dict(unit.legs).get(pending(node_id)))]
        units = self._tables.units.values()
        open_units = sum(unit.node_id == node_id and unit.state is UnitState.CLAIMED for unit in units)
        return Earnings(confirmed_micro=sum(mine), confirmed_units=len(mine), pending_units=open_units)

    def _credited(self) -> Iterator[Transfer]:
        return (one for one in self._tables.money.transfers.values() if one.kind is Kind.UNIT)

    def open_units(self, job_id: str) -> int:
        """Micro-batches of the job's units of which only one side has said something yet."""
        either = (UnitState.CLAIMED, UnitState.RECEIVED)
        units = [one for one in self._tables.units.values() if one.key.job_id == job_id and one.state in either]
        return sum((one.received or 0) if one.claimed is None else one.claimed for one in units)

    def has_ended(self, job_id: str) -> bool | None:
        job = self._tables.jobs.get(JobId(job_id))
        return None if job is None else job.state.ended

    def nodes_of(self, account: str) -> list[NodeId]:
        return sorted(one.node_id for one in self._tables.nodes.values() if one.account == account)

    def jobs_of(self, account: str) -> list[JobId]:
        return [one.job_id for one in self._tables.jobs.values() if one.owner == account]

    def owner_of_node(self, node_id: str) -> AccountId | None:
        node = self._tables.nodes.get(NodeId(node_id))
        return None if node is None else node.account

    def device_of(self, unit: Transfer) -> str:
        """The device on which a unit was computed."""
        _, job_id, epoch, _, rank = unit.key.split("/")
        return self._tables.ranks[JobId(job_id), Epoch(int(epoch)), Rank(int(rank))].device_id

    def statement(self, node_id: NodeId, query: StatementQuery) -> Statement:
        sums: dict[RowKey, StatementRow] = {}
        for one in self._credited():
            micro = dict(one.legs).get(pending(node_id), 0)
            if micro and one.hour >= query.since_hour:
                _, job_id, epoch, _, rank = one.key.split("/")
                row = RowKey(hour=one.hour, job_id=JobId(job_id), epoch=Epoch(int(epoch)), rank=Rank(int(rank)))
                device = DeviceId(self.device_of(one))
                before = sums.get(row, StatementRow(key=row, device_id=device, units=0, micro=0))
                sums[row] = replace(before, units=before.units + 1, micro=before.micro + micro)
        rows = [sums[key] for key in sorted(sums) if query.after is None or key > query.after]
        return Statement(
            rows=tuple(rows[: query.most]),
            more=len(rows) > query.most,
            earnings=self.earnings(node_id),
            money=node_money(self, node_id),
        )

    def units(self, node_id: NodeId, query: UnitsQuery) -> UnitsPage:
        line = (query.job_id, query.epoch, query.rank)
        found = [
            self._hub_unit(unit)
            for key, unit in sorted(self._tables.units.items())
            if (key.job_id, key.epoch, key.rank) == line and key.step >= query.from_step and unit.node_id == node_id
        ]
        return UnitsPage(units=tuple(found[: query.most]), more=len(found) > query.most)

    def _hub_unit(self, unit: UnitRecord) -> HubUnit:
        credited = self._tables.money.transfers.get(f"unit/{unit_name(unit.key)}")
        return HubUnit(
            key=unit.key,
            state=unit.state,
            claimed=unit.claimed,
            received=unit.received,
            micro=0 if credited is None else dict(credited.legs).get(pending(unit.node_id), 0),
        )
