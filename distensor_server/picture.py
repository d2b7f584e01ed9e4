"""Everything that the dashboard may see, as values. Built by the supervisor, turned into sections by `sections`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from distensor.comm import LinkStatus
from distensor.core.control import Assignment, Earnings, Topology
from distensor.core.ids import Epoch, JobId, WorkerId
from distensor_server.devices.model import Device
from distensor_server.lifecycle import Life
from distensor_server.messages import Progress
from distensor_server.rates import LinkRate

KEPT_ENDED_JOBS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerView:
    """One worker as it is now. `since` and `retry_at` are Unix time."""

    worker_id: WorkerId
    assignment: Assignment
    life: Life
    since: float
    pid: int | None
    progress: Progress | None
    links: tuple[LinkRate, ...]
    rss: int | None
    retry_at: float | None = None


@dataclass(kw_only=True, slots=True)
class JobRecord:
    """What is known of one membership of a job."""

    job_id: JobId
    name: str
    epoch: Epoch
    first: Assignment
    topology: Topology | None = None
    units: int = 0
    ended: str | None = None
    """The hub's reason; None while the job goes on."""


class HoldKind(StrEnum):
    PAUSE = "pause"
    DRAIN = "drain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """The owner wants no work, until a Unix time or until resumed."""

    kind: HoldKind
    until: float | None = None
    lasts: bool = False
    """It was asked for by its length, not by its end: when the clock is set, the end moves along."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One condition of work: open or closed, with what was read, what the limit is, and when it may change.

    `device` is None where the whole node is meant. `state` is open, closed or unknown (open, because what cannot be
    read stops nothing); '' where open and closed are all there is. Times are Unix time.
    """

    gate: str
    open: bool
    reading: str
    limit: str = ""
    next_change_at: float | None = None
    device: str | None = None
    state: str = ""
    since: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedEvent:
    at: float
    severity: str
    source: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwritten:
    """A file of ours that could not be written just now. `at` is Unix time."""

    at: float
    text: str
    errno: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One moment of the node. Times are Unix time unless they say `monotonic`."""

    name: str
    version: str
    now: float
    started_at: float
    detected: bool
    stopping: str | None
    hold: Hold | None
    link: LinkStatus
    devices: tuple[Device, ...]
    workers: tuple[WorkerView, ...]
    jobs: tuple[JobRecord, ...]
    earnings: Earnings
    earnings_at: float | None
    today_micro: int
    events: tuple[LoggedEvent, ...] = field(default=())
    gates: tuple[Gate, ...] = field(default=())
    """Conditions that features add to those of `nodestate.gates`."""
    unanswered: int = 0
    """Claims that the hub has not answered: it counts no unit of them, so they are pending besides its own."""
    unwritten: Unwritten | None = None
    """The last write that failed, while that is recent."""
    helper_pids: frozenset[int] = frozenset()
    """Processes of ours that are no workers and may use a device."""

    @property
    def pending_units(self) -> int:
        """Units that were claimed and are not confirmed, as far as the hub knows and beyond."""
        return self.earnings.pending_units + self.unanswered

    @property
    def own_pids(self) -> frozenset[int]:
        """All processes of ours that may use a device: whoever counts foreign use leaves them out."""
        return self.helper_pids | {worker.pid for worker in self.workers if worker.pid is not None}
