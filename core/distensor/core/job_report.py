"""What a hub says about its jobs: lists of them, and where the ranks of one are and why."""

from __future__ import annotations

from dataclasses import dataclass

from distensor.core.control import JobState, WorkerState
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank
from distensor.core.money import credits_text
from distensor.core.parallel import ParallelConfig, RankLayout
from distensor.core.table import table

MOST_JOBS = 200
"""In one page."""
MOST_PASSED = 50
"""Nodes without a rank that a report names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRank:
    """Where a rank is, and the rule by which it got there."""

    rank: Rank
    node_id: NodeId
    node: str
    device_id: DeviceId
    why: str
    state: WorkerState | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedNode:
    """A node that got no rank, and why."""

    node: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSummary:
    """A job in a list. `position` is its place in the queue, from 1; 0 when it does not wait."""

    job_id: JobId
    name: str
    owner: str
    state: JobState
    epoch: Epoch
    parallel: ParallelConfig
    reason: str = ""
    priority: int = 0
    position: int = 0

    @property
    def workers(self) -> int:
        return self.parallel.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQuery:
    """Which page of the jobs: those behind `after`, at most so many; `ended`: also those that have ended."""

    ended: bool = False
    after: JobId | None = None
    most: int = MOST_JOBS


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsPage:
    jobs: tuple[JobSummary, ...]
    more: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    """What a job costs its trainer, in micro-credits.

    `spent` is `work` and `fees` together, and so is what came from the escrow, the deposit and the platform.
    """

    job_id: JobId
    quoted: int
    """0 for a job that did not say how much it will compute."""
    escrow: int
    """Still set aside."""
    refunded: int
    units: int
    spent: int
    work: int
    fees: int
    lent: int
    """Of what was spent, paid by the platform because escrow and deposit did not have it."""

    def __str__(self) -> str:
        rows = [
            ("quoted", self.quoted),
            ("spent", self.spent),
            ("  work", self.work),
            ("  fees", self.fees),
            ("  lent by the platform", self.lent),
            ("set aside", self.escrow),
            ("refunded", self.refunded),
        ]
        lines = table(("", "credits"), [(name, credits_text(micro)) for name, micro in rows])
        return f"job {self.job_id}: {self.units} units credited\n{lines}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReport:
    """A job with the reasons for its placement, or with what it waits for."""

    job: JobSummary
    ranks: tuple[PlacedRank, ...] = ()
    passed: tuple[PassedNode, ...] = ()
    missing: str = ""
    """Why it cannot be placed now; empty for a job that has been placed."""
    cost: JobCost | None = None

    def __str__(self) -> str:
        lines = [_headline(self.job)]
        if self.missing:
            lines.append(f"missing: {self.missing}")
        if self.ranks:
            layout = RankLayout(self.job.parallel)
            rows = [
                (
                    one.rank,
                    _coordinates(layout, one.rank),
                    one.node,
                    one.device_id,
                    "-" if one.state is None else one.state.value,
                    one.why or "-",
                )
                for one in self.ranks
            ]
            lines.append(table(("rank", "place", "node", "device", "worker", "why there"), rows))
        if self.passed:
            lines.append(table(("node without a rank", "why"), [(one.node, one.why) for one in self.passed]))
        if self.cost is not None and (self.cost.spent or self.cost.quoted):
            lines.append(f"cost: {credits_text(self.cost.spent)} of {credits_text(self.cost.quoted)} credits quoted")
        return "\n".join(lines)


def _coordinates(layout: RankLayout, rank: Rank) -> str:
    """Only the axes that are cut: the others say nothing."""
    if rank >= layout.config.world_size:
        return "aggregator"
    place, config = layout.coordinates(rank), layout.config
    return " ".join(f"{axis}{place.on(axis)}" for axis in reversed(config.axes) if config.size(axis) > 1) or "-"


def _headline(job: JobSummary) -> str:
    queue = f", place {job.position} in the queue with priority {job.priority}" if job.position else ""
    reason = f": {job.reason}" if job.reason else ""
    what = f"{job.workers} workers ({job.parallel.describe()}) of {job.owner}"
    return f"job {job.name} ({job.job_id}): {job.state.value}{queue}{reason}\n{what}, epoch {job.epoch}"


def jobs_table(jobs: tuple[JobSummary, ...]) -> str:
    rows = [
        (
            job.job_id,
            job.name,
            job.owner,
            job.state.value + (f" ({job.position})" if job.position else ""),
            job.workers,
            job.epoch,
            job.reason,
        )
        for job in jobs
    ]
    return table(("job", "name", "account", "state", "workers", "epoch", "reason"), rows)
