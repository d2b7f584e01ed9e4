"""Nodes, devices, jobs and their ranks as they are sent."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field

from distensor.cloud.answers import Shape
from distensor.core.control import DeviceInfo, DeviceKind, JobState, MeshNode, WorkerState
from distensor.core.job_report import JobReport, JobSummary, PlacedRank
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Reading, Unavailable
from distensor.hub.records import RankRecord

T = TypeVar("T")


def known(reading: Reading[T]) -> T | None:
    """JSON has one word for 'not available'."""
    return None if isinstance(reading, Unavailable) else reading


class DeviceShape(Shape):
    """An accelerator or the CPU of a node; a figure that nobody could read is null."""

    node: str
    device: str
    kind: DeviceKind
    name: str
    slots: int = Field(description="how many workers it takes at once")
    usable: bool
    unusable_because: str | None
    memory_bytes: int | None
    free_bytes: int | None
    matmul_flops: float | None = Field(description="float32 operations a second, measured by its node")


def device_shape(node: MeshNode, device: DeviceInfo) -> DeviceShape:
    return DeviceShape(
        node=str(node.info.node_id),
        device=device.device_id,
        kind=device.kind,
        name=device.name,
        slots=device.slots,
        usable=device.unusable is None,
        unusable_because=device.unusable,
        memory_bytes=known(device.memory_bytes),
        free_bytes=known(device.free_bytes),
        matmul_flops=known(device.matmul_flops),
    )


class NodeShape(Shape):
    """A machine with a supervisor, as the hub sees it."""

    node: str
    name: str
    version: str
    connected: bool = Field(description="its heartbeats are answered")
    free_slots: int
    seconds_since_heartbeat: float | None = Field(description="whole seconds; null when none was heard since the start")
    account: str | None = Field(description="null where it is not the caller's business")
    addresses: list[str] | None = Field(description="of its workers; null where it is not the caller's business")
    devices: list[DeviceShape]


def node_shape(node: MeshNode, account: str, *, inside: bool) -> NodeShape:
    """`inside`: for its own account and for admins."""
    silence = known(node.seconds_since_heartbeat)
    return NodeShape(
        node=str(node.info.node_id),
        name=node.info.name,
        version=node.info.version,
        connected=node.connected,
        free_slots=node.free_slots,
        seconds_since_heartbeat=None if silence is None else float(int(silence)),
        account=account if inside else None,
        addresses=list(node.info.all_hosts) if inside else None,
        devices=[device_shape(node, device) for device in node.info.devices],
    )


class ParallelShape(Shape):
    """The sizes of a mesh."""

    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    order: str


def parallel_shape(parallel: ParallelConfig) -> ParallelShape:
    return ParallelShape(
        data_parallel=parallel.data_parallel,
        tensor_parallel=parallel.tensor_parallel,
        pipeline_parallel=parallel.pipeline_parallel,
        context_parallel=parallel.context_parallel,
        order=parallel.order,
    )


class JobShape(Shape):
    """A training run."""

    job: str
    name: str
    account: str
    state: JobState
    reason: str
    epoch: int
    parallel: ParallelShape
    workers: int
    priority: int
    position: int | None = Field(description="place in the queue, from 1; null for a job that does not wait")


def job_shape(job: JobSummary) -> JobShape:
    return JobShape(
        job=job.job_id,
        name=job.name,
        account=job.owner,
        state=job.state,
        reason=job.reason,
        epoch=job.epoch,
        parallel=parallel_shape(job.parallel),
        workers=job.workers,
        priority=job.priority,
        position=job.position or None,
    )


class PlacedShape(Shape):
    """Where a rank is, and by which rule."""

    rank: int
    node: str
    node_name: str
    device: str
    why: str
    state: WorkerState | None


def _placed(rank: PlacedRank) -> PlacedShape:
    return PlacedShape(
        rank=rank.rank,
        node=rank.node_id,
        node_name=rank.node,
        device=rank.device_id,
        why=rank.why,
        state=rank.state,
    )


class PassedShape(Shape):
    """A node without a rank, and why."""

    node_name: str
    why: str


class ExplanationShape(Shape):
    """Why the ranks of a job are where they are, or what it waits for."""

    job: JobShape
    ranks: list[PlacedShape]
    passed: list[PassedShape]
    missing: str | None


def explanation_shape(report: JobReport) -> ExplanationShape:
    return ExplanationShape(
        job=job_shape(report.job),
        ranks=list(map(_placed, report.ranks)),
        passed=[PassedShape(node_name=one.node, why=one.why) for one in report.passed],
        missing=report.missing or None,
    )


class RankShape(Shape):
    """One rank of one epoch, with the newest news of its worker."""

    rank: int
    node: str
    device: str
    state: WorkerState | None
    restarts: int
    reason: str
    continues: int | None = Field(description="the rank of the epoch before whose process went on as this one")


class TopologyShape(Shape):
    """The ranks of one epoch of a job; those behind the mesh are aggregators."""

    job: str
    epoch: int
    present: bool = Field(description="whether this is the job's newest epoch")
    ranks: list[RankShape]


def rank_shape(rank: RankRecord) -> RankShape:
    return RankShape(
        rank=rank.rank,
        node=rank.node_id,
        device=rank.device_id,
        state=rank.state,
        restarts=rank.restarts,
        reason=rank.reason,
        continues=rank.continues,
    )


class EpochsShape(Shape):
    """The epochs of a job in which it had ranks."""

    job: str
    epochs: list[int]
