"""The values that hub, supervisor and trainer exchange. `distensor.comm` turns them into messages and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from distensor.core.ids import DeviceId, Epoch, Generation, JobId, NodeId, Rank, WorkerId
from distensor.core.money import credits_text
from distensor.core.parallel import ParallelConfig
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.core.reading import Reading, Unavailable
from distensor.core.table import bytes_text, count_text, table


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    MLX = "mlx"
    AGGREGATOR = "aggregator"
    """No device: room for an aggregator of one more job."""


class JobState(StrEnum):
    """A job's life: QUEUED while there is no place for it, PLACED until all workers are ready, RUNNING once the
    topology is out."""

    QUEUED = "queued"
    PLACED = "placed"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)


class WorkerState(StrEnum):
    """The worker lifecycle of the supervisor."""

    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    DRAINING = "draining"
    EXITED = "exited"
    BACKOFF = "backoff"
    BROKEN = "broken"


NOT_BENCHMARKED = Unavailable(reason="no benchmark of the device yet")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """One accelerator, or the CPU of a machine.

    `slots` is how many workers it takes at once; `unusable` is the reason why it takes none.
    """

    device_id: DeviceId
    kind: DeviceKind
    name: str
    slots: int
    memory_bytes: Reading[int]
    free_bytes: Reading[int]
    unusable: str | None = None
    uuid: str = ""
    """The same after a reboot; empty where the device has none."""
    matmul_flops: Reading[float] = NOT_BENCHMARKED
    """Float32 operations a second that one may count on (10th percentile of a short benchmark)."""
    memory_bytes_per_second: Reading[float] = NOT_BENCHMARKED


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """What a node says of itself when it registers. `host` is where peers reach its workers."""

    name: str
    host: str
    version: str
    devices: tuple[DeviceInfo, ...]
    node_id: NodeId | None = None
    """None until the hub has given one; kept by the node from then on."""
    hosts: tuple[str, ...] = ()
    """Further addresses of its workers, the likeliest first."""
    seen_host: str = ""
    """From where the hub sees it; the hub's own word, never taken from a node."""

    @property
    def all_hosts(self) -> tuple[str, ...]:
        """Every address at which its workers may be reached, the likeliest first."""
        return tuple(dict.fromkeys(host for host in (self.host, *self.hosts, self.seen_host) if host))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshNode:
    """A node as the hub sees it."""

    info: NodeInfo
    connected: bool
    """True only while the stream is open and a heartbeat has been answered on it."""
    free_slots: int
    seconds_since_heartbeat: Reading[float]
    confirmed_micro: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWay:
    """The connection from one node to another as both ends saw it; a figure is None while it is not measured.

    `path` is one of here, lan, ipv6, public and relay. `rate` is bytes a second of the newest large message in this
    direction. The round trip (seconds) was measured `age` seconds before the newest step ended.
    """

    path: str
    rate: float | None = None
    rtt: float | None = None
    age: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshMeasures:
    """What the ranks of a job have measured, by the names of their nodes.

    `links` are seconds of one message of the pipeline, (from, to); `speed` is floating-point operations a second of
    one rank, the mean of those on the node.
    """

    links: Mapping[tuple[str, str], LinkSeconds]
    speed: Mapping[str, float]
    ways: Mapping[tuple[str, str], MeasuredWay] = field(default_factory=dict)
    """(from, to), every pair of nodes of the newest job that are connected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What work costs for a job that is submitted now."""

    price: int
    """Micro-credits of one micro-batch on one rank, the fee within them."""
    fee_per_mille: int
    deposits: bool
    """Whether a job needs a deposit that covers its quote."""

    def quote(self, *, steps: int, ranks: int, micro_batches: int) -> int:
        """What a job costs at most, in micro-credits; `micro_batches` are those of one rank in one step."""
        return steps * ranks * micro_batches * self.price

    def __str__(self) -> str:
        needs = "a job needs a deposit for its quote" if self.deposits else "no deposit is needed"
        return f"a micro-batch on one worker costs {credits_text(self.price)} credits; {needs}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Everything a trainer may place work on. `measures` are the session's own; the hub has none."""

    generation: Generation
    nodes: tuple[MeshNode, ...]
    measures: MeshMeasures | None = None
    terms: Terms | None = None
    """None where the hub has not said them."""

    @property
    def available_workers(self) -> int:
        return sum(node.free_slots for node in self.nodes if node.connected)

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        devices = (device for node in self.nodes if node.connected for device in node.info.devices)
        return tuple(device for device in devices if device.kind is not DeviceKind.AGGREGATOR)

    @property
    def free_bytes(self) -> Reading[int]:
        """Free memory of all usable devices, as far as their nodes can tell."""
        known = [device.free_bytes for device in self.devices if device.unusable is None]
        readings = [reading for reading in known if not isinstance(reading, Unavailable)]
        return sum(readings) if readings else Unavailable(reason="no connected node can tell")

    @property
    def links(self) -> Reading[Mapping[tuple[str, str], LinkSeconds]]:
        """Seconds of one message of a pipeline between two nodes, (from, to)."""
        return self.measures.links if self.measures and self.measures.links else NOT_MEASURED

    @property
    def ways(self) -> Reading[Mapping[tuple[str, str], MeasuredWay]]:
        """By which way each two nodes of the newest job are connected, what it carries, and its round trip."""
        return NOT_CONNECTED if self.measures is None or not self.measures.ways else self.measures.ways

    @property
    def measured_speed(self) -> Reading[Mapping[str, float]]:
        """Floating-point operations a second of one rank, by node."""
        return self.measures.speed if self.measures and self.measures.speed else NOT_MEASURED

    def __str__(self) -> str:
        rows = [
            (node.info.name, *_device_cells(device), node.free_slots if first else "")
            for node in self.nodes
            for device, first in _marked(node)
        ]
        lines = [
            f"{self.available_workers} workers can be placed on {sum(n.connected for n in self.nodes)} connected nodes",
            table(("node", "device", "kind", "slots", "memory", "free", "free workers"), rows),
        ]
        terms = [] if self.terms is None else [str(self.terms)]
        return "\n".join([*lines, *terms, *_measure_lines(self.measures)])


NOT_CONNECTED = Unavailable(reason="not known yet: the ranks of a job tell it with each step")
NOT_MEASURED = Unavailable(reason="not measured yet: the ranks of a 1F1B pipeline measure it in their first steps")


def _measure_lines(measures: MeshMeasures | None) -> list[str]:
    ways = [] if measures is None or not measures.ways else [_ways_table(measures.ways)]
    if measures is None or not measures.links:
        return [*ways, f"links and speed: {NOT_MEASURED.reason}"]
    links = [
        (one, other, f"{link.latency * 1e3:.2f} ms", f"{link.total * 1e3:.2f} ms")
        for (one, other), link in measures.links.items()
    ]
    speeds = [(node, f"{count_text(speed)}FLOP/s") for node, speed in measures.speed.items()]
    tables = [table(("from", "to", "latency", "one message"), links), table(("node", "measured speed"), speeds)]
    return [*ways, *tables]


def _ways_table(ways: Mapping[tuple[str, str], MeasuredWay]) -> str:
    rows = [
        (
            *ends,
            way.path,
            "-" if way.rtt is None else f"{way.rtt * 1e3:.1f} ms",
            "-" if way.age is None else f"{way.age:.0f} s",
            "-" if way.rate is None else f"{way.rate * 8 / 1e6:.1f} Mbit/s",
        )
        for ends, way in ways.items()
    ]
    return table(("from", "to", "way", "round trip", "age", "rate"), rows)


def _marked(node: MeshNode) -> list[tuple[DeviceInfo, bool]]:
    return [(device, index == 0) for index, device in enumerate(node.info.devices if node.connected else ())]


def _device_cells(device: DeviceInfo) -> tuple[object, ...]:
    memory, free = (
        "unknown" if isinstance(reading, Unavailable) else bytes_text(reading)
        for reading in (device.memory_bytes, device.free_bytes)
    )
    slots = device.slots if device.unusable is None else f"none: {device.unusable}"
    return device.name, device.kind.value, slots, memory, free


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What a trainer asks the hub to place.

    `submission` makes the request idempotent: the same one sent twice is one job. `csr_pem` is the driver's
    certificate request for the data plane.
    """

    submission: str
    name: str
    parallel: ParallelConfig
    csr_pem: str
    bytes_per_rank: tuple[int, ...] = ()
    """Predicted memory of each rank; empty means unknown."""
    device_kinds: tuple[DeviceKind, ...] = ()
    """Only these kinds; empty means any."""
    aggregators: tuple[str, ...] = ()
    """The nodes that are to have an aggregator each, by name; an empty one is any that has room for one. They get the
    ranks after those of the mesh, in this order."""
    split_tensor: bool = False
    """Whether a tensor-parallel group may be split over machines that are far from each other."""
    wait: bool = False
    """Whether to wait in the queue when there is no place now, instead of being refused."""
    priority: int = 0
    """Among the jobs that wait the higher one is placed first."""
    steps: int = 0
    """How many steps it will take at most, for its quote; 0 where nobody has said it."""
    micro_batches: int = 0
    """Of one rank in one step at most, for its quote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconfiguration:
    """What a trainer asks of the hub when the members of its running job are to be others.

    `request` makes it idempotent: the same one sent twice is one new epoch. `epoch` is the present one. `continues`
    has for each rank of the new membership the rank of the present one whose process goes on as it, with all that it
    holds; None for a new worker. Ranks that go on as none are released.
    """

    job_id: JobId
    request: str
    epoch: Epoch
    parallel: ParallelConfig
    continues: tuple[Rank | None, ...]
    csr_pem: str
    bytes_per_rank: tuple[int, ...] = ()
    aggregators: tuple[str, ...] = ()
    """As in `JobSpec`, all of them new; where there is no room for one, the epoch is without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeOver:
    """What a trainer asks of the hub when it goes on with a job whose trainer has ended.

    `request` makes it idempotent: the same one sent twice is one new epoch.
    """

    job_id: JobId
    request: str
    csr_pem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One rank of one epoch of a job, given to one device of a node."""

    job_id: JobId
    job_name: str
    epoch: Epoch
    rank: Rank
    parallel: ParallelConfig
    device_id: DeviceId
    worker_id: WorkerId
    continues: Rank | None = None
    """The rank of the epoch before this one whose process goes on as this rank; None for a new process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReady:
    """A worker listens on `port` and asks for the certificate of its rank."""

    job_id: JobId
    epoch: Epoch
    rank: Rank
    port: int
    csr_pem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerChange:
    """A worker changed its state; `reason` says why it ended."""

    job_id: JobId
    epoch: Epoch
    rank: Rank
    state: WorkerState
    restarts: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Where one rank of a topology lives."""

    rank: Rank
    node_id: NodeId
    node_name: str
    host: str
    port: int
    hosts: tuple[str, ...] = ()
    """Further addresses, the likeliest first; the port is the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """All ranks of one epoch."""

    job_id: JobId
    job_name: str
    epoch: Epoch
    parallel: ParallelConfig
    members: tuple[Member, ...]
    relay: str = ""
    """host:port of the relay for members whom no address leads to; empty where the hub knows none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A signed certificate for one place of the data plane, and the authority that signed it."""

    rank: Rank
    certificate_pem: str
    authority_pem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUpdate:
    """News of a job for its trainer. `certificate` comes with the first update that has a topology."""

    job_id: JobId
    state: JobState
    epoch: Epoch
    reason: str = ""
    topology: Topology | None = None
    certificate: Certificate | None = None
    workers: tuple[WorkerChange, ...] = ()
    """The latest known change of each rank that has one."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class UnitKey:
    """One piece of metered work. The same key is credited once, for ever."""

    job_id: JobId
    epoch: Epoch
    step: int
    rank: Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A claim (by the worker) or a receipt (by the trainer) for one unit."""

    key: UnitKey
    micro_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Earnings:
    """What the hub has in its books for one node, in integer micro-credits and units."""

    confirmed_micro: int = 0
    confirmed_units: int = 0
    pending_units: int = 0
    """Claimed by the node, receipt of the trainer not seen yet."""
