"""What the hub says, and what this node does about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from distensor.comm import LinkState, LinkStatus
from distensor.core.control import Assignment, Certificate, Earnings, Topology, WorkerChange, WorkerState
from distensor.core.ids import Epoch, JobId
from distensor_server.books import Books
from distensor_server.config import is_loopback
from distensor_server.feature import Features
from distensor_server.hublink import HubLink
from distensor_server.journal import Journal
from distensor_server.ownaddress import OwnAddress
from distensor_server.workforce import Workforce


class _Node(Protocol):
    """What is needed of `node.Node`, which makes this."""

    address: OwnAddress
    link: HubLink
    journal: Journal
    workforce: Workforce
    books: Books
    features: Features
    on_change: Callable[[], None]

    def refusal(self, assignment: Assignment | None = None) -> str | None: ...

    def just_woken(self) -> bool: ...


class HubEvents:
    """The handler of the hub link. `on_connected` is called once, with the id of this node."""

    def __init__(self, node: _Node, on_connected: Callable[[str | None], None]) -> None:
        self._node = node
        self._on_connected = on_connected
        self._told_connected = False
        self._shown_link = ""

    def on_status(self, status: LinkStatus) -> None:
        if status.state is LinkState.CONNECTED and not self._told_connected:
            self._told_connected = True
            self._on_connected(status.node_id)
            self._warn_of_loopback(status.address)
        self._tell_link(status)
        self._node.on_change()

    def _tell_link(self, status: LinkStatus) -> None:
        if status.state is LinkState.CONNECTED:
            text = f"connected to {status.address}"
        elif status.error is not None and status.state is not LinkState.NO_KEY:  # of the key others tell
            text = f"{status.state.value}: {status.error.message}; {status.error.fix}"
        else:
            return
        if status.state is not LinkState.CONNECTED and self._node.just_woken():
            return  # the network needs a moment after a sleep; what lasts longer is told with the next try
        if text != self._shown_link:
            self._shown_link = text
            severity = "info" if status.state is LinkState.CONNECTED else "warning"
            self._node.journal.add(severity, "hub", text)

    def _warn_of_loopback(self, hub: str) -> None:
        host = self._node.address.current
        if is_loopback(host) and not is_loopback(hub):
            text = (
                f"peers on other machines cannot reach workers at {host}: start with --host and this machine's address"
            )
            self._node.journal.add("warning", "supervisor", text)

    def on_assignment(self, assignment: Assignment) -> None:
        reason = self._node.refusal(assignment) or self._node.workforce.assign(assignment)
        if reason is not None:
            text = f"refused rank {assignment.rank} of {assignment.job_name}: {reason}"
            self._node.journal.add("warning", "hub", text)
            self._node.link.report(
                WorkerChange(
                    job_id=assignment.job_id,
                    epoch=assignment.epoch,
                    rank=assignment.rank,
                    state=WorkerState.EXITED,
                    restarts=0,
                    reason=f"refused: {reason}",
                )
            )
        self._node.on_change()

    def on_topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        self._node.workforce.topology(topology, certificates)
        self._node.on_change()

    def on_release(self, job_id: JobId, epoch: Epoch, reason: str) -> None:
        if self._node.workforce.release(job_id, epoch, reason):
            self._node.journal.add("info", "hub", f"job {job_id} (epoch {epoch}) released: {reason}")

    def on_earnings(self, earnings: Earnings) -> None:
        self._node.books.confirmed(earnings)
        self._node.features.tell("on_earnings", lambda feature: feature.on_earnings(earnings))
        self._node.on_change()
