"""Jobs and their ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distensor.core.control import JobState, WorkerState
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank, WorkerId
from distensor.hub.machine import MOST_ENDED
from distensor.hub.record_json import (
    parallel_from_json,
    parallel_to_json,
    placement_from_json,
    placement_to_json,
    wish_from_json,
    wish_to_json,
)
from distensor.hub.records import JobRecord, RankRecord
from distensor.hub.stores.engine import Row, Table
from distensor.hub.stores.rows import Rows

_ENDED = tuple(state.value for state in JobState if state.ended)
_MARKS = ", ".join("?" * len(_ENDED))
_RANKS = Table(
    name="ranks",
    columns=(
        "job_id",
        "epoch",
        "rank",
        "node_id",
        "device_id",
        "worker_id",
        "port",
        "certificate",
        "state",
        "restarts",
        "reason",
        "continues",
    ),
    texts=frozenset({"job_id", "node_id", "device_id", "worker_id", "certificate", "state", "reason"}),
    key=3,
)
_NEWS = (
    "ON CONFLICT (job_id, epoch, rank) DO UPDATE SET port = excluded.port, certificate = excluded.certificate, "
    "state = excluded.state, restarts = excluded.restarts, reason = excluded.reason"
)


class JobRows(Rows):
    def recent_jobs(self) -> tuple[JobRecord, ...]:
        """All live jobs, then the newest of those that ended."""
        live = self._run(f"SELECT job_id FROM jobs WHERE state NOT IN ({_MARKS}) ORDER BY number", _ENDED).fetchall()
        ended = self._run(
            f"SELECT job_id FROM jobs WHERE state IN ({_MARKS}) ORDER BY number DESC LIMIT ?",
            (*_ENDED, MOST_ENDED),
        ).fetchall()
        return tuple(self._job(JobId(job_id)) for (job_id,) in [*live, *reversed(ended)])

    def has_ended(self, job_id: str) -> bool | None:
        row = self._run("SELECT state FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        return None if row is None else JobState(row[0]).ended

    def submissions(self) -> dict[tuple[str, str], tuple[JobId, Epoch]]:
        """By owner and submission, the job that each became and its present epoch."""
        return {
            (owner, submission): (JobId(job_id), Epoch(epoch))
            for owner, submission, job_id, epoch in self._run("SELECT owner, submission, job_id, epoch FROM jobs")
        }

    def find_job(self, job_id: JobId) -> JobRecord | None:
        row = self._run("SELECT job_id FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
        return None if row is None else self._job(job_id)

    def epochs_of(self, job_id: JobId) -> tuple[Epoch, ...]:
        rows = self._run("SELECT DISTINCT epoch FROM ranks WHERE job_id = ? ORDER BY epoch", (job_id,))
        return tuple(Epoch(epoch) for (epoch,) in rows)

    def ranks_of(self, job_id: JobId, epoch: Epoch) -> tuple[RankRecord, ...]:
        rows = self._run(
            "SELECT rank, node_id, device_id, worker_id, port, certificate, state, restarts, reason, continues "
            "FROM ranks WHERE job_id = ? AND epoch = ? ORDER BY rank",
            (job_id, epoch),
        )
        return tuple(map(_rank, rows))

    def _job(self, job_id: JobId) -> JobRecord:
        row = self._run(
            "SELECT owner, submission, name, parallel, epoch, state, driver_certificate, reason, request, wish, "
            "placement, price, fee "
            "FROM jobs WHERE job_id = ?",
            (job_id,),
        ).fetchone()
        owner, submission, name, parallel, epoch, state, driver_certificate, reason, request, wish, *more = row
        placement, price, fee = more
        return JobRecord(
            job_id=job_id,
            owner=owner,
            submission=submission,
            name=name,
            parallel=parallel_from_json(parallel),
            epoch=Epoch(epoch),
            state=JobState(state),
            driver_certificate_pem=driver_certificate,
            ranks=self.ranks_of(job_id, Epoch(epoch)),
            reason=reason,
            request=request,
            wish=wish_from_json(wish),
            placement=placement_from_json(placement),
            price=price,
            fee_per_mille=fee,
        )

    def insert_job(self, job: JobRecord) -> None:
        self._run(
            "INSERT INTO jobs (job_id, owner, submission, name, parallel, epoch, state, "
            "driver_certificate, reason, wish, placement, price, fee) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                wish_to_json(job.wish),
                placement_to_json(job.placement),
                job.price,
                job.fee_per_mille,
            ),
        )
        self._save_ranks(job.job_id, job.epoch, job.ranks)

    def update_job(self, job: JobRecord) -> None:
        self._run(
            "UPDATE jobs SET state = ?, reason = ?, driver_certificate = ? WHERE job_id = ?",
            (job.state.value, job.reason, job.driver_certificate_pem, job.job_id),
        )

    def begin_epoch(self, job: JobRecord) -> None:
        self._run(
            "UPDATE jobs SET state = ?, parallel = ?, epoch = ?, driver_certificate = ?, request = ?, reason = ?, "
            "wish = ?, placement = ? WHERE job_id = ?",
            (
                job.state.value,
                parallel_to_json(job.parallel),
                job.epoch,
                job.driver_certificate_pem,
                job.request,
                job.reason,
                wish_to_json(job.wish),
                placement_to_json(job.placement),
                job.job_id,
            ),
        )
        self._save_ranks(job.job_id, job.epoch, job.ranks)

    def save_rank(self, job_id: JobId, epoch: Epoch, rank: RankRecord) -> None:
        self._save_ranks(job_id, epoch, (rank,))

    def _save_ranks(self, job_id: JobId, epoch: Epoch, ranks: Iterable[RankRecord]) -> None:
        self._engine.insert(_RANKS, [_rank_row(job_id, epoch, rank) for rank in ranks], _NEWS)


def _rank_row(job_id: JobId, epoch: Epoch, rank: RankRecord) -> Row:
    return (
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
    )


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
