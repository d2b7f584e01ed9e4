"""A worker process that is no rank of the mesh: an aggregator of its job, at the chosen node."""

from __future__ import annotations

import contextlib
import threading

from distensor.aggregator.serving import Serving, open_plane
from distensor.core import Clock
from distensor.core.errors import TransportError
from distensor.node.ipc import Emitter, Mailbox, WorkerAssignment
from distensor.node.membership import MembershipDesk, Seat
from distensor.node.progress import ProgressReporter
from distensor.transport import DataPlane, Listener, Timeouts


class AggregatorRuntime:
    """Serves one epoch: in the next one the job's aggregators are new."""

    def __init__(
        self, *, assignment: WorkerAssignment, mailbox: Mailbox, emitter: Emitter, clock: Clock, timeouts: Timeouts
    ) -> None:
        self._assignment = assignment
        self._mailbox = mailbox
        self._emitter = emitter
        self._clock = clock
        self._timeouts = timeouts
        self._plane: DataPlane | None = None
        self._progress = ProgressReporter(emitter=emitter, clock=clock)

    def run(self) -> None:
        """Returns when every member has gone, or the supervisor drains.

        Raises:
            TransportError: a peer sent what does not belong.
        """
        with contextlib.closing(Listener.bind(self._assignment.listen_host)) as listener:
            desk = MembershipDesk(
                self._assignment,
                port=listener.address.port,
                mailbox=self._mailbox,
                emitter=self._emitter,
                on_seat=lambda: None,
            )
            desk.start()
            threading.Thread(target=self._leave_on_drain, args=(desk,), name="drain-watch", daemon=True).start()
            seat = desk.next(-1)
            if seat is not None:
                self._serve(seat, listener)

    def _serve(self, seat: Seat, listener: Listener) -> None:
        peers = {**seat.peers, **seat.aggregators}
        with open_plane(
            seat.me,
            seat.credentials,
            listener,
            peers,
            clock=self._clock,
            relay=seat.relay,
            timeouts=self._timeouts,
        ) as plane:
            self._plane = plane
            self._emitter.emit("connected")
            self._progress.watch(plane)
            members = frozenset(range(seat.assignment.parallel.world_size))
            serving = Serving(plane, self._clock, members, on_round=self._progress.worked)
            try:
                serving.run()
            except TransportError:
                if not self._mailbox.draining:
                    raise

    def _leave_on_drain(self, desk: MembershipDesk) -> None:
        self._mailbox.wait_for_drain()
        desk.leave()
        if self._plane is not None:
            self._plane.close()
