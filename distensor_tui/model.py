"""What the supervisor says, as frozen values. None means not available; the reason stands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from distensor_tui.income import Income, caught_up


class NodeState(StrEnum):
    STARTING = "STARTING"
    EARNING = "EARNING"
    IDLE = "IDLE"
    WAITING = "WAITING"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    DEGRADED = "DEGRADED"
    OFFLINE = "OFFLINE"
    UNKNOWN = "UNKNOWN"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class HubState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    OFFLINE = "offline"
    REJECTED = "rejected"
    NO_KEY = "no key"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error that somebody can act on."""

    code: str
    message: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One condition for taking work; open means that it lets work through."""

    name: str
    open: bool
    reading: str
    limit: str
    next_change_at: float | None
    device: str | None = None
    """Only for this device; None for the whole node."""
    since: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One limit of the owner, as text. `device`: it holds for that device alone."""

    key: str
    device: str | None
    value: str
    default: str
    unit: str
    expected: str
    source: str
    per_device: bool
    help: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """`file` is where the owner's changes are kept."""

    file: str
    rows: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that is broken now. `part` is worker, device, hub, disk or section; `subject` the id of which one.

    `log` is the command that shows what happened. Times are Unix time.
    """

    part: str
    subject: str | None
    code: str
    cause: str
    fix: str
    log: str
    since: float | None = None
    retry_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """How much of the limits is used: by device the share of its time that it may work; bytes of workers."""

    duty: Mapping[str, float]
    bytes_day: int
    bytes_month: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    id: str
    name: str
    version: str
    state: NodeState
    state_since: float | None
    started_at: float | None
    why: tuple[Gate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    state: HubState
    address: str
    rtt_ms: float | None
    since: float | None
    next_retry_at: float | None
    error: Problem | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    id: str
    kind: str
    name: str
    usable: bool
    reason: str | None
    slots: int
    utilization: float | None
    memory_used: int | None
    memory_total: int | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    workers: tuple[str, ...]
    unavailable: Mapping[str, str]
    fault: bool = False
    """The reason why it is not used is worth a warning."""
    parent: str = ""
    profile: str = ""
    unified_memory: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    """uuid, driver, runtime, bus, cores: those that the supervisor knows."""
    temperature_limit_c: float | None = None
    energy_j: float | None = None
    fan: float | None = None
    clock_mhz: float | None = None
    clock_limit_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    processes: tuple[DeviceProcess, ...] | None = None
    benchmark: DeviceBenchmark | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBenchmark:
    """What was measured at `at`; rates per second by name, or the reason why there is none."""

    at: float
    stale: bool
    rates: Mapping[str, float]
    missing: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProcess:
    """Somebody who uses a device; `owner` is own, foreign or unknown."""

    pid: int
    name: str
    type: str
    memory: int | None
    utilization: float | None
    owner: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """How the replicas of a worker's weights agree, and the bytes that it sent them in its last step and got from them,
    beside those of a ring all-reduce of its gradients."""

    how: str
    up: int
    down: int
    ring: int

    @property
    def reduction(self) -> float | None:
        """How many times fewer bytes than the ring the busier direction had; None before the first step."""
        busiest = max(self.up, self.down)
        return self.ring / busiest if busiest > 0 and self.ring > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    id: str
    job: str
    job_name: str
    epoch: int
    rank: int
    stages: tuple[int, ...]
    device: str
    state: str
    pid: int | None
    step: int | None
    loss: float | None
    tokens_per_second: float | None
    compute_s: float
    sync_s: float
    wait_s: float
    restarts: int
    last_exit: str | None
    rss: int | None
    since: float | None
    replicas: Replicas | None = None

    @property
    def finished(self) -> bool:
        """Its job came to its end, which is no trouble. These are the supervisor's and the hub's words for that."""
        return self.state == "exited" and self.last_exit == "released: finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    order: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    rank: int
    node: str
    dp: int
    tp: int
    pp: int
    cp: int
    mine: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLink:
    """Traffic of one of this node's ranks with a peer. `peer` -1 is the trainer."""

    rank: int
    peer: int
    sent: int
    received: int
    sent_rate: float | None
    received_rate: float | None
    rtt_ms: float | None = None
    rtt_age_s: float | None = None
    path: str = ""
    """By which way the peer is reached: here, lan, ipv6, public or relay; empty where the supervisor does not say."""
    line_rate: float | None = None
    """Bytes a second at which the peer's newest large message came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: str
    name: str
    state: str
    epoch: int
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    parallel: Parallel
    members: tuple[Member, ...]
    links: tuple[PeerLink, ...]
    units: int

    @property
    def ended(self) -> bool:
        return self.state == "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Earnings:
    confirmed_micro: int
    confirmed_units: int
    pending_units: int
    today_micro: int
    confirmed_at: float | None
    price_note: str

    @property
    def pending_micro(self) -> int | None:
        """What the pending units are worth at the mean of the confirmed ones; None while none is confirmed."""
        if not self.confirmed_units:
            return None
        return self.confirmed_micro * self.pending_units // self.confirmed_units


class AuthState(StrEnum):
    MISSING = "missing"
    UNPROVEN = "unproven"
    REGISTERED = "registered"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Auth:
    """Where the key is and what the hub thinks of it; never the key itself."""

    state: AuthState
    source: str | None
    where: str | None
    key: str | None
    """Its beginning, masked."""
    hub: str | None
    problem: str | None
    fix: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    at: float
    severity: Severity
    source: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All sections. A section that is None has not come, or is not available (see `unavailable`)."""

    node: Node | None = None
    hub: Hub | None = None
    devices: tuple[Device, ...] | None = None
    workers: tuple[Worker, ...] | None = None
    jobs: tuple[Job, ...] | None = None
    earnings: Earnings | None = None
    events: tuple[Event, ...] | None = None
    auth: Auth | None = None
    limits: Limits | None = None
    usage: Usage | None = None
    faults: tuple[Fault, ...] | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    """Sections that the supervisor failed to build, and why."""
    income: Income | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What could not be read, each with its path."""

    @property
    def account(self) -> Income | None:
        """The node's account, no older than what the hub has confirmed today."""
        earnings, income = self.earnings, self.income
        return income if income is None or earnings is None else caught_up(income, earnings.today_micro)

    def broken(self, part: str, subject: str | None = None) -> tuple[Fault, ...]:
        """The faults of a part, or of one worker or device."""
        return tuple(fault for fault in self.faults or () if fault.part == part and subject in (None, fault.subject))

    @property
    def live_workers(self) -> tuple[Worker, ...]:
        """Without those that ended with their job; the supervisor keeps them in its list for their last words."""
        ended = {(job.id, job.epoch) for job in self.jobs or () if job.ended}
        return tuple(
            worker
            for worker in self.workers or ()
            if worker.state != "exited" or (worker.job, worker.epoch) not in ended
        )

    @property
    def live_jobs(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs or () if not job.ended)
