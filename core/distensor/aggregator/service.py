"""An aggregator as a node of a hub: it is given places of jobs, and serves each epoch in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distensor import __version__
from distensor.aggregator.serving import Serving, open_plane
from distensor.comm.identity import new_key_and_csr
from distensor.comm.link_status import LinkState, LinkStatus
from distensor.comm.messages import JobRef
from distensor.core.clock import Clock
from distensor.core.control import (
    Assignment,
    Certificate,
    DeviceInfo,
    DeviceKind,
    Earnings,
    NodeInfo,
    Topology,
    WorkerReady,
)
from distensor.core.errors import ConfigError, TransportError
from distensor.core.ids import DeviceId, Epoch, JobId
from distensor.core.reading import Unavailable
from distensor.transport import Credentials, DataPlane, Listener, PeerId, places_at, relay_at

DEVICE = DeviceId("aggregator")
NOTHING = Unavailable(reason="an aggregator computes nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What this aggregator offers.

    Args:
        name: of the node. host: where replicas reach it, also what it listens on.
        slots: jobs at once.
        message_bytes: that one update may have.
        job_bytes: that may pass for one epoch of a job, in and out together; None: no limit.
        rate: bytes a second of one job, in each direction; None: no limit.
    """

    name: str
    host: str
    slots: int
    message_bytes: int
    job_bytes: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        positive = [self.slots, self.message_bytes, self.job_bytes, self.rate]
        if any(value is not None and value <= 0 for value in positive):
            raise ConfigError(f"{self}: slots and every cap are above 0")


class Link(Protocol):
    """What is needed of `NodeLink`."""

    def report(self, report: WorkerReady) -> None: ...


@dataclass(slots=True, eq=False)
class _Seat:
    """One place of one epoch."""

    assignment: Assignment
    listener: Listener
    key_pem: bytes = field(repr=False)
    plane: DataPlane | None = None
    over: bool = False


class AggregatorService:
    """The handler of a `NodeLink`; assign the link to `link` before it runs. Belongs to the link's event loop."""

    link: Link

    def __init__(
        self, terms: Terms, clock: Clock, log: Callable[[str], None], on_connected: Callable[[], None]
    ) -> None:
        self._terms = terms
        self._clock = clock
        self._log = log
        self._on_connected = on_connected
        self._seats: dict[JobRef, _Seat] = {}
        self._shown = ""

    def describe(self) -> NodeInfo:
        device = DeviceInfo(
            device_id=DEVICE,
            kind=DeviceKind.AGGREGATOR,
            name="aggregator",
            slots=self._terms.slots,
            memory_bytes=NOTHING,
            free_bytes=NOTHING,
        )
        return NodeInfo(name=self._terms.name, host=self._terms.host, version=__version__, devices=(device,))

    def running(self) -> Sequence[JobRef]:
        return list(self._seats)

    def on_status(self, status: LinkStatus) -> None:
        if status.state is LinkState.CONNECTED:
            self._on_connected()
        text = status.state.value if status.error is None else f"{status.state.value}: {status.error.message}"
        if text != self._shown:
            self._shown = text
            self._log(f"hub {status.address}: {text}")

    def on_assignment(self, assignment: Assignment) -> None:
        ref = assignment.job_id, assignment.epoch, assignment.rank
        if ref in self._seats:
            return
        try:
            listener = Listener.bind(self._terms.host)
        except ConfigError as error:
            self._log(f"job {assignment.job_name}: {error}")
            return
        key_pem, csr_pem = new_key_and_csr(*ref)
        self._seats[ref] = _Seat(assignment, listener, key_pem)
        job_id, epoch, rank = ref
        port = listener.address.port
        self.link.report(WorkerReady(job_id=job_id, epoch=epoch, rank=rank, port=port, csr_pem=csr_pem))

    def on_topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        for certificate in certificates:
            seat = self._seats.get((topology.job_id, topology.epoch, certificate.rank))
            if seat is not None and seat.plane is None:
                name = f"aggregate-{topology.job_id}-{topology.epoch}"
                thread = threading.Thread(
                    target=self._serve, args=(seat, topology, certificate), name=name, daemon=True
                )
                thread.start()

    def on_release(self, job_id: JobId, epoch: Epoch, reason: str) -> None:
        for ref in [ref for ref in self._seats if ref[:2] == (job_id, epoch)]:
            seat = self._seats.pop(ref)
            seat.over = True
            seat.listener.close()
            if seat.plane is not None:
                threading.Thread(target=seat.plane.close, daemon=True).start()  # saying goodbye takes a moment

    def on_earnings(self, earnings: Earnings) -> None:
        """Nothing is paid for aggregating."""

    def close(self) -> None:
        for job_id, epoch in {ref[:2] for ref in self._seats}:
            self.on_release(job_id, epoch, "stopping")

    def _serve(self, seat: _Seat, topology: Topology, certificate: Certificate) -> None:
        name, rank = topology.job_name, certificate.rank
        try:
            with self._open(seat, topology, certificate) as plane:
                seat.plane = plane
                if seat.over:
                    return
                plane.limit_rates(send=self._terms.rate, receive=self._terms.rate)
                self._log(f"job {name} (epoch {topology.epoch}): aggregating as rank {rank}")
                members = frozenset(range(topology.parallel.world_size))
                serving = Serving(plane, self._clock, members, self._terms.job_bytes)
                serving.run()
                self._log(f"job {name} (epoch {topology.epoch}): done, {serving.passed:,} bytes passed")
        except TransportError as error:
            self._log(f"job {name} (epoch {topology.epoch}): {error}")

    def _open(self, seat: _Seat, topology: Topology, certificate: Certificate) -> DataPlane:
        return open_plane(
            PeerId(job_id=topology.job_id, epoch=topology.epoch, rank=certificate.rank),
            Credentials(
                key_pem=seat.key_pem,
                certificate_pem=certificate.certificate_pem,
                authority_pem=certificate.authority_pem,
            ),
            seat.listener,
            {m.rank: places_at((m.host, *m.hosts), m.port) for m in topology.members if m.rank != certificate.rank},
            clock=self._clock,
            relay=relay_at(topology.relay),
            message_bytes=self._terms.message_bytes,
        )
