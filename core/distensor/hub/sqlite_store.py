"""The hub's books in one SQLite file: WAL, synchronous FULL, an append-only ledger guarded by triggers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distensor.core.control import Earnings, JobState, UnitKey, WorkerState
from distensor.core.errors import StoreError
from distensor.core.ids import DeviceId, Epoch, Generation, JobId, NodeId, Rank, WorkerId
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery, UnitState
from distensor.hub.machine import MOST_ENDED
from distensor.hub.metering import PlaceOfWork, Posting, UnitRecord, node_account
from distensor.hub.record_json import info_from_json, info_to_json, parallel_from_json, parallel_to_json
from distensor.hub.records import JobRecord, NodeRecord, RankRecord, TokenRecord
from distensor.hub.repository import Snapshot
from distensor.hub.sqlite_schema import SCHEMA_VERSION, UPGRADES
from distensor.hub.sqlite_statement import statement, units_page

_LIVE = (JobState.PLACED.value, JobState.RUNNING.value)


class SqliteStore:
    """One connection; used by one thread at a time.

    Raises:
        StoreError: the file cannot be opened or is of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
            path.chmod(0o600)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._upgrade()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"database {path}: {error}") from error

    def _upgrade(self) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            self._connection.close()
            raise StoreError(
                f"database {self._path} has version {version}, this hub knows up to {SCHEMA_VERSION}: "
                "it was written by a newer disTensor; install that version or a later one"
            )
        for number, script in enumerate(UPGRADES[version:], version + 1):
            self._connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")

    @contextmanager
    def transaction(self) -> Iterator[SqliteBooks]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield SqliteBooks(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back("ROLLBACK")
            raise StoreError(f"database {self._path}: {error}") from error
        except BaseException:  # whatever it was, nothing of it stays; it goes on upwards
            self._roll_back("ROLLBACK")
            raise

    @contextmanager
    def part(self) -> Iterator[None]:
        self._connection.execute("SAVEPOINT part")
        try:
            yield
        except sqlite3.OperationalError as error:  # the disk, not the caller's data: the whole group fails
            raise StoreError(f"database {self._path}: {error}") from error
        except BaseException:  # whatever it was, nothing of the part stays; it goes on upwards
            self._roll_back("ROLLBACK TO part")
            self._connection.execute("RELEASE part")
            raise
        self._connection.execute("RELEASE part")

    def _roll_back(self, statement: str) -> None:
        if self._connection.in_transaction:
            self._connection.execute(statement)

    def close(self) -> None:
        self._connection.close()


class SqliteBooks:
    """One transaction on the connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._run = connection.execute
        self._run_many = connection.executemany
        self._places: dict[tuple[JobId, Epoch, Rank], PlaceOfWork] = {}

    def begin_generation(self) -> Generation:
        self._run("INSERT INTO meta VALUES ('generation', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1")
        return Generation(self._run("SELECT value FROM meta WHERE key = 'generation'").fetchone()[0])

    def snapshot(self) -> Snapshot:
        nodes = tuple(
            NodeRecord(node_id=NodeId(node_id), secret_hash=secret_hash, info=info_from_json(info))
            for node_id, secret_hash, info in self._run("SELECT node_id, secret_hash, info FROM nodes")
        )
        live = self._run("SELECT job_id FROM jobs WHERE state IN (?, ?)", _LIVE).fetchall()
        ended = self._run(
            "SELECT job_id FROM jobs WHERE state NOT IN (?, ?) ORDER BY number DESC LIMIT ?",
            (*_LIVE, MOST_ENDED),
        ).fetchall()
        return Snapshot(
            nodes=nodes,
            jobs=tuple(self._job(JobId(job_id)) for (job_id,) in [*live, *reversed(ended)]),
            submissions={
                (owner, submission): (JobId(job_id), Epoch(epoch))
                for owner, submission, job_id, epoch in self._run("SELECT owner, submission, job_id, epoch FROM jobs")
            },
            earnings={node.node_id: self.earnings(node.node_id) for node in nodes},
        )

    def _job(self, job_id: JobId) -> JobRecord:
        row = self._run(
            "SELECT owner, submission, name, parallel, epoch, state, driver_certificate, reason, request "
            "FROM jobs WHERE job_id = ?",
            (job_id,),
        ).fetchone()
        owner, submission, name, parallel, epoch, state, driver_certificate, reason, request = row
        ranks = self._run(
            "SELECT rank, node_id, device_id, worker_id, port, certificate, state, restarts, reason, continues "
            "FROM ranks WHERE job_id = ? AND epoch = ? ORDER BY rank",
            (job_id, epoch),
        )
        return JobRecord(
            job_id=job_id,
            owner=owner,
            submission=submission,
            name=name,
            parallel=parallel_from_json(parallel),
            epoch=Epoch(epoch),
            state=JobState(state),
            driver_certificate_pem=driver_certificate,
            ranks=tuple(_rank(row) for row in ranks),
            reason=reason,
            request=request,
        )

    def find_token(self, secret_hash: str) -> TokenRecord | None:
        row = self._run(
            "SELECT role, subject, used_by, spent FROM tokens WHERE secret_hash = ?", (secret_hash,)
        ).fetchone()
        if row is None:
            return None
        role, subject, used_by, spent = row
        used = None if used_by is None else NodeId(used_by)
        return TokenRecord(secret_hash=secret_hash, role=role, subject=subject, used_by=used, spent=bool(spent))

    def save_token(self, token: TokenRecord) -> None:
        self._run(
            "INSERT INTO tokens VALUES (?, ?, ?, ?, ?) ON CONFLICT (secret_hash) DO UPDATE SET "
            "used_by = excluded.used_by, spent = excluded.spent",
            (token.secret_hash, token.role, token.subject, token.used_by, token.spent),
        )

    def spend_token(self, node_id: NodeId) -> None:
        self._run("UPDATE tokens SET spent = 1 WHERE used_by = ? AND spent = 0", (node_id,))

    def save_node(self, node: NodeRecord) -> None:
        self._run(
            "INSERT INTO nodes VALUES (?, ?, ?) ON CONFLICT (node_id) DO UPDATE SET "
            "secret_hash = excluded.secret_hash, info = excluded.info",
            (node.node_id, node.secret_hash, info_to_json(node.info)),
        )

    def insert_job(self, job: JobRecord) -> None:
        self._run(
            "INSERT INTO jobs (job_id, owner, submission, name, parallel, epoch, state, "
            "driver_certificate, reason) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                job.job_id,
                job.owner,
                job.submission,
                job.name,
                parallel_to_json(job.parallel),
                job.epoch,
                job.state.value,
                job.driver_certificate_pem,
                job.reason,
            ),
        )
        for rank in job.ranks:
            self.save_rank(job.job_id, job.epoch, rank)

    def update_job(self, job: JobRecord) -> None:
        self._run(
            "UPDATE jobs SET state = ?, reason = ?, driver_certificate = ? WHERE job_id = ?",
            (job.state.value, job.reason, job.driver_certificate_pem, job.job_id),
        )

    def begin_epoch(self, job: JobRecord) -> None:
        self._run(
            "UPDATE jobs SET state = ?, parallel = ?, epoch = ?, driver_certificate = ?, request = ? WHERE job_id = ?",
            (
                job.state.value,
                parallel_to_json(job.parallel),
                job.epoch,
                job.driver_certificate_pem,
                job.request,
                job.job_id,
            ),
        )
        for rank in job.ranks:
            self.save_rank(job.job_id, job.epoch, rank)

    def save_rank(self, job_id: JobId, epoch: Epoch, rank: RankRecord) -> None:
        self._run(
            "INSERT INTO ranks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (job_id, epoch, rank) DO UPDATE SET port = excluded.port, "
            "certificate = excluded.certificate, state = excluded.state, restarts = excluded.restarts, "
            "reason = excluded.reason",
            (
                job_id,
                epoch,
                rank.rank,
                rank.node_id,
                rank.device_id,
                rank.worker_id,
                rank.port,
                rank.certificate_pem,
                None if rank.state is None else rank.state.value,
                rank.restarts,
                rank.reason,
                rank.continues,
            ),
        )

    def find_place(self, job_id: JobId, epoch: Epoch, rank: Rank) -> PlaceOfWork | None:
        key = (job_id, epoch, rank)
        if key not in self._places:
            row = self._run(
                "SELECT jobs.owner, ranks.node_id FROM ranks JOIN jobs USING (job_id) "
                "WHERE ranks.job_id = ? AND ranks.epoch = ? AND ranks.rank = ?",
                key,
            ).fetchone()
            if row is None:
                return None
            owner, node_id = row
            self._places[key] = PlaceOfWork(owner=owner, node_id=NodeId(node_id))
        return self._places[key]

    def find_unit(self, key: UnitKey) -> UnitRecord | None:
        row = self._run(
            "SELECT node_id, state, claimed, received FROM units "
            "WHERE job_id = ? AND epoch = ? AND step = ? AND rank = ?",
            _columns(key),
        ).fetchone()
        if row is None:
            return None
        node_id, state, claimed, received = row
        return UnitRecord(key=key, node_id=NodeId(node_id), state=UnitState(state), claimed=claimed, received=received)

    def save_unit(self, unit: UnitRecord) -> None:
        self._run(
            "INSERT INTO units VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (job_id, epoch, step, rank) DO UPDATE SET state = excluded.state, "
            "claimed = excluded.claimed, received = excluded.received",
            (*_columns(unit.key), unit.node_id, unit.state.value, unit.claimed, unit.received),
        )

    def post(self, posting: Posting) -> None:
        """Two entries that sum to zero. The same unit twice violates the ledger's unique key."""
        columns = _columns(posting.key)
        self._run_many(
            "INSERT INTO entries (job_id, epoch, step, rank, account, amount, hour) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (*columns, posting.debit, -posting.amount, posting.hour),
                (*columns, posting.credit, posting.amount, posting.hour),
            ],
        )

    def earnings(self, node_id: NodeId) -> Earnings:
        row = self._run("SELECT amount, entries FROM balances WHERE account = ?", (node_account(node_id),)).fetchone()
        (pending,) = self._run(
            "SELECT count(*) FROM units WHERE node_id = ? AND state = 'claimed'", (node_id,)
        ).fetchone()
        amount, units = row or (0, 0)
        return Earnings(confirmed_micro=amount, confirmed_units=units, pending_units=pending)

    def statement(self, node_id: NodeId, query: StatementQuery) -> Statement:
        return statement(self._run, node_id, query, self.earnings(node_id))

    def units(self, node_id: NodeId, query: UnitsQuery) -> UnitsPage:
        return units_page(self._run, node_id, query)


def _columns(key: UnitKey) -> tuple[str, int, int, int]:
    return key.job_id, key.epoch, key.step, key.rank


def _rank(row: Any) -> RankRecord:
    rank, node_id, device_id, worker_id, port, certificate, state, restarts, reason, continues = row
    return RankRecord(
        rank=Rank(rank),
        node_id=NodeId(node_id),
        device_id=DeviceId(device_id),
        worker_id=WorkerId(worker_id),
        port=port,
        certificate_pem=certificate,
        state=None if state is None else WorkerState(state),
        restarts=restarts,
        reason=reason,
        continues=None if continues is None else Rank(continues),
    )
