"""The sections of the local protocol, schema version 1, from one `Picture`. Pure; every value is plain JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from distensor.core.control import WorkerState
from distensor.core.parallel import ParallelConfig, RankLayout
from distensor_server.devicesection import device_section, rounded
from distensor_server.faults import faults
from distensor_server.messages import Progress
from distensor_server.nodestate import gates, node_state
from distensor_server.picture import Gate, JobRecord, Picture, WorkerView

SCHEMA_VERSION = 1
PRICE_NOTE = "1 unit = 1000 micro-credits per micro-batch"

Section: TypeAlias = Any
Sections: TypeAlias = dict[str, Section]


def build_sections(picture: Picture, state_since: float) -> Sections:
    """All sections. `state_since` is when the node's present state began."""
    return {
        "node": _node(picture, state_since),
        **{name: build(picture) for name, build in _BUILDERS.items()},
    }


def changed_sections(before: Mapping[str, Section], after: Mapping[str, Section]) -> Sections:
    """The sections of `after` that differ, whole."""
    return {name: section for name, section in after.items() if before.get(name) != section}


def _node(picture: Picture, state_since: float) -> Section:
    return {
        "id": picture.link.node_id,
        "name": picture.name,
        "version": picture.version,
        "state": node_state(picture).value,
        "state_since": state_since,
        "started_at": picture.started_at,
        "why": [_gate(gate) for gate in gates(picture)],
    }


def _gate(gate: Gate) -> Section:
    return {**asdict(gate), "state": gate.state or ("open" if gate.open else "closed")}


def _hub(picture: Picture) -> Section:
    link = picture.link
    error = link.error
    return {
        "state": link.state.value,
        "address": link.address or None,
        "rtt_ms": rounded(link.rtt_ms, 1),
        "clock_skew_s": rounded(link.hub_clock_skew, 1),
        "since": link.since,
        "next_retry_at": link.next_retry_at,
        "error": None if error is None else {"code": error.code, "message": error.message, "fix": error.fix},
    }


def _devices(picture: Picture) -> Section:
    own = picture.own_pids
    return [device_section(device, picture.workers, own) for device in picture.devices]


def _workers(picture: Picture) -> Section:
    return [_worker(worker) for worker in picture.workers]


def _worker(worker: WorkerView) -> Section:
    assignment, life, progress = worker.assignment, worker.life, worker.progress
    return {
        "id": worker.worker_id,
        "job": assignment.job_id,
        "job_name": assignment.job_name,
        "epoch": assignment.epoch,
        "rank": assignment.rank,
        "stages": list(progress.stages) if progress else [],
        "device": assignment.device_id,
        "state": life.state.value,
        "pid": worker.pid,
        "step": progress.step if progress else None,
        "loss": progress.loss if progress else None,
        "tokens_per_second": _live(worker, progress.tokens_per_second if progress else None),
        "compute_s": progress.compute_s if progress else None,
        "sync_s": progress.sync_s if progress else None,
        "wait_s": progress.wait_s if progress else None,
        "replicas": _replicas(progress),
        "restarts": life.restarts,
        "failures": life.failures,
        "retry_at": worker.retry_at,
        "last_exit": life.last_exit or None,
        "rss": worker.rss,
        "since": worker.since,
    }


def _replicas(progress: Progress | None) -> Section:
    found = progress.replicas if progress else None
    return None if found is None else {"how": found.how, "up": found.up, "down": found.down, "ring": found.ring}


def _live(worker: WorkerView, value: float | None) -> float | None:
    """A speed of a worker that is not running is history, not a reading."""
    return value if worker.life.state in (WorkerState.RUNNING, WorkerState.DRAINING) else None


def _jobs(picture: Picture) -> Section:
    return [_job(job, picture) for job in picture.jobs]


def _job(job: JobRecord, picture: Picture) -> Section:
    workers = [w for w in picture.workers if (w.assignment.job_id, w.assignment.epoch) == (job.job_id, job.epoch)]
    newest = max((w.progress for w in workers if w.progress), key=lambda progress: progress.step, default=None)
    with_loss = [w.progress for w in workers if w.progress and w.progress.loss is not None]
    loss = max(with_loss, key=lambda progress: progress.step).loss if with_loss else None
    # Every worker reports the speed of the whole job as it sees it, so they are not added up.
    speeds = [speed for w in workers if w.progress and (speed := _live(w, w.progress.tokens_per_second)) is not None]
    return {
        "id": job.job_id,
        "name": job.name,
        "state": _job_state(job),
        "epoch": job.epoch,
        "step": newest.step if newest else None,
        "total_steps": newest.total_steps if newest else None,
        "loss": loss,
        "tokens_per_second": max(speeds, default=None),
        "parallel": _parallel(job.first.parallel),
        "members": _members(job, picture, workers),
        "links": [link for worker in workers for link in _links(worker)],
        "units": job.units,
    }


def _job_state(job: JobRecord) -> str:
    if job.ended is not None:
        return "ended"
    return "running" if job.topology is not None else "starting"


def _parallel(parallel: ParallelConfig) -> Section:
    return {
        "dp": parallel.data_parallel,
        "tp": parallel.tensor_parallel,
        "pp": parallel.pipeline_parallel,
        "cp": parallel.context_parallel,
        "order": parallel.order,
    }


def _members(job: JobRecord, picture: Picture, workers: list[WorkerView]) -> Section:
    """All ranks of the mesh once the topology is known; before that, those of this node. Aggregators are none."""
    mine = {int(worker.assignment.rank) for worker in workers}
    if job.topology is None:
        places = [(rank, picture.link.node_id, picture.name) for rank in sorted(mine)]
    else:
        places = [(int(m.rank), m.node_id, m.node_name) for m in job.topology.members]
    layout = RankLayout(job.first.parallel)
    return [
        {"rank": rank, "node_id": node_id, "node": name, **asdict(layout.coordinates(rank)), "mine": rank in mine}
        for rank, node_id, name in places
        if rank < layout.config.world_size
    ]


def _links(worker: WorkerView) -> list[Section]:
    return [
        {
            "from": worker.assignment.rank,
            "to": link.peer,
            "sent": link.sent,
            "received": link.received,
            "sent_rate": rounded(link.sent_rate, 0),
            "received_rate": rounded(link.received_rate, 0),
            "rtt_ms": rounded(link.rtt_ms, 2),
            # In steps of ten seconds, so that a link on which nothing happens makes no news.
            "rtt_age_s": None if link.rtt_age_s is None else link.rtt_age_s // 10 * 10,
            "path": link.path,
            "line_rate": rounded(link.line_rate, 0),
        }
        for link in worker.links
    ]


def _earnings(picture: Picture) -> Section:
    earnings = picture.earnings
    return {
        "confirmed_micro": earnings.confirmed_micro,
        "confirmed_units": earnings.confirmed_units,
        "pending_units": picture.pending_units,
        "today_micro": picture.today_micro,
        "confirmed_at": picture.earnings_at,
        "price_note": PRICE_NOTE,
    }


def _events(picture: Picture) -> Section:
    return [asdict(event) for event in picture.events]


def _faults(picture: Picture) -> Section:
    return [asdict(fault) for fault in faults(picture)]


_BUILDERS: dict[str, Callable[[Picture], Section]] = {
    "hub": _hub,
    "devices": _devices,
    "workers": _workers,
    "jobs": _jobs,
    "earnings": _earnings,
    "events": _events,
    "faults": _faults,
}
