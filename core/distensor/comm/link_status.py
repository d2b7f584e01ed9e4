"""How a node's link to its hub is doing, for those who show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from distensor.core.control import Assignment, Certificate, Earnings, Topology
from distensor.core.ids import Epoch, Generation, JobId, NodeId
from distensor.core.reading import Reading, Unavailable

NOT_MEASURED = Unavailable(reason="no heartbeat has been answered yet")


class LinkState(StrEnum):
    """CONNECTED only after the hub has answered a heartbeat on the open stream."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    OFFLINE = "offline"
    REJECTED = "rejected"
    NO_KEY = "no key"
    """No hub was asked: this machine has neither a credential nor a token to get one with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkError:
    """What went wrong, and what the owner can do about it."""

    code: str
    message: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStatus:
    """A picture of the link. Times are seconds since the Unix epoch by the node's own clock."""

    state: LinkState
    address: str
    since: float
    rtt_ms: Reading[float] = NOT_MEASURED
    next_retry_at: float | None = None
    error: LinkError | None = None
    node_id: NodeId | None = None
    generation: Generation | None = None
    hub_clock_skew: Reading[float] = NOT_MEASURED
    """Hub's clock minus ours, in seconds."""


class NodeLinkHandler(Protocol):
    """What a node does with the hub's words. Called in the link's event loop; must not block."""

    def on_status(self, status: LinkStatus) -> None: ...

    def on_assignment(self, assignment: Assignment) -> None:
        """May come again after a reconnect when `running` did not name the rank."""

    def on_topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        """Once for each membership of a job; repeats of the hub are not passed on."""

    def on_release(self, job_id: JobId, epoch: Epoch, reason: str) -> None: ...

    def on_earnings(self, earnings: Earnings) -> None: ...
