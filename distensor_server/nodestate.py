"""The one word for the node, and the gates that explain it. Pure."""

from __future__ import annotations

from enum import StrEnum

from distensor.comm import LinkState
from distensor.core.control import WorkerState
from distensor_server.picture import Gate, HoldKind, Picture, WorkerView


class NodeState(StrEnum):
    STARTING = "STARTING"
    EARNING = "EARNING"
    IDLE = "IDLE"
    WAITING = "WAITING"
    PAUSED = "PAUSED"
    DRAINING = "DRAINING"
    DEGRADED = "DEGRADED"
    OFFLINE = "OFFLINE"


def node_state(picture: Picture) -> NodeState:
    """In this order: what the owner wants, what is in the way, what the machine does."""
    return _owners_wish(picture) or _trouble(picture) or _activity(picture)


def status_line(picture: Picture) -> str:
    """The state word and what one wants to know with it: for `systemctl status`."""
    state = node_state(picture)
    if state in (NodeState.EARNING, NodeState.IDLE, NodeState.STARTING):
        alive = sum(worker.life.alive for worker in picture.workers)
        usable = sum(device.unusable is None for device in picture.devices)
        return f"{state.value}: workers {alive}, usable devices {usable}, hub {picture.link.state.value}"
    closed = next((gate for gate in gates(picture) if not gate.open), None)
    return state.value if closed is None else f"{state.value}: {closed.gate}: {closed.reading}"


def _owners_wish(picture: Picture) -> NodeState | None:
    if picture.stopping is not None:
        return NodeState.DRAINING
    if picture.hold is None:
        return None
    return NodeState.DRAINING if _alive(picture) else NodeState.PAUSED


def _trouble(picture: Picture) -> NodeState | None:
    if not picture.detected:
        return NodeState.STARTING
    if _gated(picture) and not any(worker.life.wanted for worker in picture.workers):
        return NodeState.DRAINING if _alive(picture) else NodeState.WAITING
    if picture.link.state is not LinkState.CONNECTED:
        return _without_hub(picture)
    if any(_limps(worker) for worker in picture.workers) or any(device.fault for device in picture.devices):
        return NodeState.DEGRADED
    if not any(device.unusable is None for device in picture.devices):
        return NodeState.WAITING
    return None


def _gated(picture: Picture) -> bool:
    """A closed gate of the node keeps all work away, and so do gates on every device that could work."""
    closed = {gate.device for gate in picture.gates if not gate.open}
    usable = {device.device_id for device in picture.devices if device.unusable is None}
    return None in closed or (bool(usable) and usable <= closed)


def _without_hub(picture: Picture) -> NodeState:
    """Work goes on without the hub; without work, nothing can come in."""
    if _alive(picture):
        return NodeState.DEGRADED
    never_tried = picture.link.state is LinkState.CONNECTING and picture.link.error is None
    return NodeState.STARTING if never_tried else NodeState.OFFLINE


def _activity(picture: Picture) -> NodeState:
    if any(worker.life.state is WorkerState.RUNNING for worker in picture.workers):
        return NodeState.EARNING
    return NodeState.STARTING if _alive(picture) else NodeState.IDLE


def _alive(picture: Picture) -> bool:
    return any(worker.life.alive for worker in picture.workers)


def _limps(worker: WorkerView) -> bool:
    """Broken, waiting to come back, or back but not in the run again."""
    state = worker.life.state
    if state in (WorkerState.BROKEN, WorkerState.BACKOFF):
        return True
    return worker.life.restarts > 0 and state in (WorkerState.STARTING, WorkerState.READY)


def gates(picture: Picture) -> tuple[Gate, ...]:
    """Every condition, open or closed, in the order in which they are asked."""
    return (_user_gate(picture), *picture.gates, _device_gate(picture), _hub_gate(picture), _worker_gate(picture))


def _user_gate(picture: Picture) -> Gate:
    hold = picture.hold
    if picture.stopping is not None:
        return Gate(gate="user_pause", open=False, reading=picture.stopping)
    if hold is None:
        return Gate(gate="user_pause", open=True, reading="not paused")
    word = "paused" if hold.kind is HoldKind.PAUSE else "drained"
    until = "until resumed" if hold.until is None else "for a time"
    return Gate(gate="user_pause", open=False, reading=f"{word} by the owner, {until}", next_change_at=hold.until)


def _device_gate(picture: Picture) -> Gate:
    if not picture.detected:
        return Gate(gate="devices", open=False, reading="looking for devices", limit="at least 1 usable")
    usable = sum(device.unusable is None for device in picture.devices)
    faults = [f"{device.device_id}: {device.unusable}" for device in picture.devices if device.fault]
    reading = "; ".join([f"{usable} of {len(picture.devices)} usable", *faults])
    return Gate(gate="devices", open=usable > 0, reading=reading, limit="at least 1 usable")


def _hub_gate(picture: Picture) -> Gate:
    link = picture.link
    error = None if link.state is LinkState.NO_KEY else link.error  # the gate of the key says all of that
    reading = f"{link.state.value}: {error.message}" if error else link.state.value
    connected = link.state is LinkState.CONNECTED
    return Gate(gate="hub", open=connected, reading=reading, limit="connected", next_change_at=link.next_retry_at)


def _worker_gate(picture: Picture) -> Gate:
    limping = [worker for worker in picture.workers if _limps(worker)]
    if not limping:
        return Gate(gate="workers", open=True, reading="no worker in trouble")
    reading = "; ".join(f"{worker.worker_id} {worker.life.state.value} ({worker.life.last_exit})" for worker in limping)
    broken = any(worker.life.state is WorkerState.BROKEN for worker in limping)
    return Gate(
        gate="workers",
        open=False,
        reading=reading,
        limit="broken ones start again by `distensor retry`" if broken else "",
        next_change_at=min((worker.retry_at for worker in limping if worker.retry_at is not None), default=None),
    )
