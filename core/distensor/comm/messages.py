"""What travels on a node's stream, as plain values. `codec` turns them into protobuf and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from distensor.core.control import (
    Assignment,
    Certificate,
    Earnings,
    NodeInfo,
    Topology,
    Unit,
    WorkerChange,
    WorkerReady,
)
from distensor.core.ids import Epoch, Generation, JobId, NodeId, Rank

JobRef: TypeAlias = tuple[JobId, Epoch, Rank]
"""One rank of one membership of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Register:
    """The first message of a node. `running` is what it holds already, so that a restarted hub knows."""

    info: NodeInfo
    running: tuple[JobRef, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sent every few seconds; `info` only when it changed."""

    sequence: int
    info: NodeInfo | None = None
    accepting: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """Units that the node's workers have done. Sent again until a `ClaimsAnswer` names the batch."""

    batch: int
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye:
    """The node leaves on purpose."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The first message of the hub. `credential` is empty when the node already has one."""

    node_id: NodeId
    credential: str
    generation: Generation
    heartbeat_seconds: float
    hubs: tuple[str, ...] = ()
    """All addresses of a hub that has several, host:port, the one that says it first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswer:
    """The hub has seen heartbeat `sequence`."""

    sequence: int
    generation: Generation
    earnings: Earnings
    hub_time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyGrant:
    """A complete topology and the certificates of those ranks that the receiving node runs."""

    topology: Topology
    certificates: tuple[Certificate, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The node's workers of this membership may end."""

    job_id: JobId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimsAnswer:
    """The batch is in the books; it need not be sent again."""

    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Why the hub closes the stream."""

    code: str
    reason: str


NodeToHub: TypeAlias = Register | Heartbeat | WorkerReady | WorkerChange | Claims | Goodbye
HubToNode: TypeAlias = Welcome | HeartbeatAnswer | Assignment | TopologyGrant | Release | ClaimsAnswer | Rejected
