"""The life of a job. Pure functions from a record and an event to the next record.

QUEUED --room for it--> PLACED; QUEUED --trainer--> CANCELLED | FAILED
PLACED --all ranks ready--> RUNNING --trainer--> FINISHED | FAILED | CANCELLED
PLACED --a node gone, a worker broken, too late--> FAILED   (the first epoch only)
PLACED | RUNNING --the trainer reconfigures--> PLACED, one epoch later
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from distensor.core.control import (
    Assignment,
    Certificate,
    JobState,
    JobUpdate,
    Member,
    NodeInfo,
    Reconfiguration,
    Topology,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.ids import DRIVER_RANK, Epoch, JobId, NodeId, Rank, WorkerId
from distensor.core.job_report import JobQuery, JobReport, JobsPage, JobSummary, PlacedRank
from distensor.hub.placement import Place
from distensor.hub.records import JobRecord, Placement, RankRecord

MOST_FURTHER_HOSTS = 5
"""Addresses of a member beside the first one: the topology of a thousand ranks has to fit into a message."""
_DOWN = frozenset({WorkerState.STARTING, WorkerState.EXITED, WorkerState.BACKOFF, WorkerState.BROKEN})


def assignment_of(job: JobRecord, rank: RankRecord) -> Assignment:
    return Assignment(
        job_id=job.job_id,
        job_name=job.name,
        epoch=job.epoch,
        rank=rank.rank,
        parallel=job.parallel,
        device_id=rank.device_id,
        worker_id=rank.worker_id,
        continues=rank.continues,
    )


def new_rank(job_id: JobId, epoch: Epoch, place: Place) -> RankRecord:
    return RankRecord(
        rank=place.rank,
        node_id=place.node_id,
        device_id=place.device_id,
        worker_id=WorkerId(f"{job_id}-{epoch}-{place.rank}"),
    )


def with_ready(job: JobRecord, ready: WorkerReady, certificate_pem: str) -> JobRecord:
    """A worker listens; the job runs once all do."""
    rank = replace(
        job.ranks[ready.rank],
        port=ready.port,
        certificate_pem=certificate_pem,
        state=WorkerState.READY,
        reason="",
    )
    job = job.with_rank(rank)
    if job.state is JobState.PLACED and all(rank.port is not None for rank in job.ranks):
        return replace(job, state=JobState.RUNNING)
    return job


def signed_together(job: JobRecord, sign_anew: Callable[[str, JobId, Epoch, Rank], str]) -> JobRecord:
    """The job with all its certificates of one moment: from its own, a member reads what time it is for the hub."""

    def anew(certificate_pem: str, rank: Rank) -> str:
        return sign_anew(certificate_pem, job.job_id, job.epoch, rank)

    ranks = tuple(replace(rank, certificate_pem=anew(rank.certificate_pem, rank.rank)) for rank in job.ranks)
    return replace(job, ranks=ranks, driver_certificate_pem=anew(job.driver_certificate_pem, DRIVER_RANK))


def with_change(job: JobRecord, change: WorkerChange) -> JobRecord:
    """A worker changed its state. One that cannot be started at all ends a job that has not begun; of a later epoch
    the trainer is told, who chooses other members."""
    rank = replace(job.ranks[change.rank], state=change.state, restarts=change.restarts, reason=change.reason)
    if job.state is JobState.PLACED and change.state in _DOWN:
        rank = replace(rank, port=None)
    job = job.with_rank(rank)
    if job.state is JobState.PLACED and change.state is WorkerState.BROKEN and not job.request:
        why = change.reason or "no reason given"
        return ended(job, JobState.FAILED, f"the worker of rank {change.rank} cannot be started: {why}")
    return job


def reconfigured(job: JobRecord, change: Reconfiguration, places: Sequence[Place], certificate_pem: str) -> JobRecord:
    """The job in its next epoch. Processes that go on keep their device and their name; all ranks have to say again
    that they are ready."""
    epoch = Epoch(job.epoch + 1)
    new = {place.rank: new_rank(job.job_id, epoch, place) for place in places}
    whys = {place.rank: place.why for place in places}
    ranks = tuple(
        new.pop(Rank(rank)) if before is None else _going_on(job.ranks[before], Rank(rank))
        for rank, before in enumerate(change.continues)
    )
    ranks += tuple(new[rank] for rank in sorted(new))  # what is left are aggregators
    return replace(
        job,
        parallel=change.parallel,
        epoch=epoch,
        state=JobState.PLACED,
        driver_certificate_pem=certificate_pem,
        ranks=ranks,
        request=change.request,
        placement=Placement(
            whys=tuple(
                whys[Rank(rank)] if before is None else f"goes on from rank {before} of epoch {job.epoch}"
                for rank, before in enumerate(change.continues)
            )
            + tuple(whys[rank] for rank in sorted(new))
        ),
    )


def _going_on(before: RankRecord, rank: Rank) -> RankRecord:
    return RankRecord(
        rank=rank,
        node_id=before.node_id,
        device_id=before.device_id,
        worker_id=before.worker_id,
        restarts=before.restarts,
        continues=before.rank,
    )


def ended(job: JobRecord, state: JobState, reason: str) -> JobRecord:
    return job if job.state.ended else replace(job, state=state, reason=reason)


def not_ready(job: JobRecord) -> list[RankRecord]:
    return [rank for rank in job.ranks if rank.port is None]


def topology_of(job: JobRecord, nodes: Mapping[NodeId, NodeInfo], relay: str = "") -> Topology:
    """All members of a running job, and the relay for those whom no address leads to."""
    return Topology(
        job_id=job.job_id,
        job_name=job.name,
        epoch=job.epoch,
        parallel=job.parallel,
        members=tuple(
            Member(
                rank=rank.rank,
                node_id=rank.node_id,
                node_name=nodes[rank.node_id].name,
                host=nodes[rank.node_id].host,
                port=rank.port or 0,
                hosts=nodes[rank.node_id].all_hosts[1 : 1 + MOST_FURTHER_HOSTS],
            )
            for rank in job.ranks
        ),
        relay=relay,
    )


def certificates_of(job: JobRecord, node_id: NodeId, authority_pem: str) -> tuple[Certificate, ...]:
    return tuple(
        Certificate(rank=rank.rank, certificate_pem=rank.certificate_pem, authority_pem=authority_pem)
        for rank in job.ranks
        if rank.node_id == node_id
    )


def update_of(job: JobRecord, nodes: Mapping[NodeId, NodeInfo], authority_pem: str, relay: str = "") -> JobUpdate:
    """What the trainer is told."""
    running = job.state is JobState.RUNNING
    return JobUpdate(
        job_id=job.job_id,
        state=job.state,
        epoch=job.epoch,
        reason=job.reason,
        topology=topology_of(job, nodes, relay) if running else None,
        certificate=Certificate(
            rank=DRIVER_RANK,
            certificate_pem=job.driver_certificate_pem,
            authority_pem=authority_pem,
        )
        if running
        else None,
        workers=job.changes(),
    )


def summary_of(job: JobRecord, position: int) -> JobSummary:
    return JobSummary(
        job_id=job.job_id,
        name=job.name,
        owner=job.owner,
        state=job.state,
        epoch=job.epoch,
        parallel=job.parallel,
        reason=job.reason,
        priority=0 if job.wish is None else job.wish.priority,
        position=position,
    )


def report_of(job: JobRecord, summary: JobSummary, names: Mapping[NodeId, str]) -> JobReport:
    whys = job.placement.whys or ("",) * len(job.ranks)
    ranks = tuple(
        PlacedRank(
            rank=rank.rank,
            node_id=rank.node_id,
            node=names[rank.node_id],
            device_id=rank.device_id,
            why=why,
            state=rank.state,
        )
        for rank, why in zip(job.ranks, whys, strict=True)
    )
    return JobReport(job=summary, ranks=ranks, passed=job.placement.passed)


def page_of(found: Sequence[JobSummary], query: JobQuery) -> JobsPage:
    """The part of a list behind `query.after`; from the beginning when that job is not in it any more."""
    start = next((place for place, job in enumerate(found, 1) if job.job_id == query.after), 0)
    page = tuple(found[start : start + query.most])
    return JobsPage(jobs=page, more=start + len(page) < len(found))


def why_stale(job: JobRecord | None, epoch: Epoch) -> str:
    if job is None:
        return "the hub knows no such job"
    if job.state.ended:
        return job.reason or f"the job is {job.state.value}"
    return f"the job's epoch is {job.epoch}, not {epoch}"


def lost(job: JobRecord, rank: RankRecord) -> WorkerChange:
    return WorkerChange(
        job_id=job.job_id,
        epoch=job.epoch,
        rank=rank.rank,
        state=WorkerState.EXITED,
        restarts=rank.restarts,
        reason="its node came back without it",
    )
