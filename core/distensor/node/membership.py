"""Which epoch of its job this process takes part in: what the supervisor says of it, in a thread of its own.

A process may go on in a later epoch as another rank, with all that it holds: its supervisor says so (`reassign`) while
the present epoch still runs, and later hands it the topology. It enters the newer epoch once it has left this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distensor.comm.identity import new_key_and_csr
from distensor.core.errors import ConfigError
from distensor.node.ipc import (
    Emitter,
    Mailbox,
    TopologyOrder,
    WorkerAssignment,
    parse_reassignment,
    parse_topology,
)
from distensor.transport import Address, Credentials, PeerId, places_at, relay_at
from distensor.transport.types import Peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A place of one epoch that is this process's to take."""

    assignment: WorkerAssignment
    credentials: Credentials = field(repr=False)
    peers: Peers
    """The other ranks of the mesh; for an aggregator, which is none of them, the other aggregators too."""
    relay: Address | None = None
    aggregators: Peers = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank, those of aggregators included."""

    @property
    def me(self) -> PeerId:
        own = self.assignment
        return PeerId(job_id=own.job_id, epoch=own.epoch, rank=own.rank)


class MembershipDesk:
    """Answers `ready` for each epoch that the supervisor names, and knows the newest seat.

    Args:
        port: where this process listens, in every epoch.
        on_seat: called, from the thread that follows the supervisor, when a seat of a newer epoch is there.
    """

    def __init__(
        self,
        first: WorkerAssignment,
        *,
        port: int,
        mailbox: Mailbox,
        emitter: Emitter,
        on_seat: Callable[[], None],
    ) -> None:
        self._wanted = first
        self._port = port
        self._mailbox = mailbox
        self._emitter = emitter
        self._on_seat = on_seat
        self._changed = threading.Condition()
        self._seat: Seat | None = None
        self._error: ConfigError | None = None
        self._leaving = False
        self._key_pem = b""

    def start(self) -> None:
        self._announce(self._wanted)
        threading.Thread(target=self._follow, name="membership", daemon=True).start()

    def leave(self) -> None:
        """No further seat is wanted: `next` returns None."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def next(self, after: int) -> Seat | None:
        """The seat of an epoch later than `after`, once there is one; None when this process is to go.

        Raises:
            ConfigError: the supervisor said what cannot be understood.
        """
        with self._changed:
            while not self._leaving:
                if self._error is not None:
                    raise self._error
                if self._seat is not None and self._seat.assignment.epoch > after:
                    return self._seat
                self._changed.wait()
            return None

    def _announce(self, assignment: WorkerAssignment) -> None:
        key_pem, csr_pem = new_key_and_csr(assignment.job_id, assignment.epoch, assignment.rank)
        with self._changed:
            self._wanted, self._key_pem = assignment, key_pem
        self._emitter.emit("ready", v=1, port=self._port, csr=csr_pem, epoch=assignment.epoch)

    def _follow(self) -> None:
        while True:
            message = self._mailbox.take()
            try:
                self._obey(message)
            except ConfigError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _obey(self, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "reassign":
                assignment = parse_reassignment(message, self._wanted)
                if assignment.epoch > self._wanted.epoch:  # an older one is no news, whoever repeats it
                    self._announce(assignment)
            case "topology":
                self._grant(parse_topology(message))

    def _grant(self, order: TopologyOrder) -> None:
        own = self._wanted
        if (order.job_id, order.epoch) != (own.job_id, own.epoch):
            # What was on its way when the membership changed, or a mistake: never obeyed.
            text = f"refused a topology of job {order.job_id} in epoch {order.epoch}: this worker is of job "
            self._emitter.event("warning", f"{text}{own.job_id} in epoch {own.epoch}")
        elif self._take(order):
            self._on_seat()

    def _take(self, order: TopologyOrder) -> bool:
        """False where it is known already: a hub that restarted tells it again."""
        with self._changed:
            if self._seat is not None and self._seat.assignment.epoch >= order.epoch:
                return False
            self._seat = self._seat_of(order)
            self._changed.notify_all()
            return True

    def _seat_of(self, order: TopologyOrder) -> Seat:
        own, world = self._wanted, self._wanted.parallel.world_size
        places = {
            member.rank: places_at(member.hosts, member.port) for member in order.members if member.rank != own.rank
        }
        return Seat(
            assignment=own,
            credentials=Credentials(
                key_pem=self._key_pem, certificate_pem=order.certificate_pem, authority_pem=order.authority_pem
            ),
            peers={rank: places for rank, places in places.items() if rank < world or own.rank >= world},
            relay=relay_at(order.relay),
            aggregators={rank: places for rank, places in places.items() if rank >= world},
            names={member.rank: member.node_name for member in order.members},
        )
