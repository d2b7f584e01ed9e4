"""The messages of a node's stream, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distensor.comm import codec
from distensor.comm.address import parse_address
from distensor.comm.channels import MAX_UNITS_PER_MESSAGE
from distensor.comm.messages import (
    Claims,
    ClaimsAnswer,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    HubToNode,
    NodeToHub,
    Register,
    Rejected,
    Release,
    TopologyGrant,
    Welcome,
)
from distensor.comm.tokens import MOST_OTHERS
from distensor.core.control import Assignment, WorkerChange, WorkerReady
from distensor.core.errors import ConfigError, HubProtocolError
from distensor.core.ids import DeviceId, Epoch, Generation, JobId, NodeId, Rank, WorkerId
from distensor.proto import control_pb2 as pb

M = TypeVar("M")


def write_node_message(message: NodeToHub) -> pb.NodeMessage:
    match message:
        case Register():
            running = [codec.write_ref(*ref) for ref in message.running]
            return pb.NodeMessage(register=pb.Register(node=codec.write_node(message.info), running=running))
        case Heartbeat():
            node = None if message.info is None else codec.write_node(message.info)
            beat = pb.Heartbeat(sequence=message.sequence, node=node, accepting=message.accepting)
            return pb.NodeMessage(heartbeat=beat)
        case WorkerReady():
            return pb.NodeMessage(worker_ready=_write_ready(message))
        case WorkerChange():
            return pb.NodeMessage(worker_change=codec.write_change(message))
        case Claims():
            units = [codec.write_unit(unit) for unit in message.units]
            return pb.NodeMessage(claims=pb.Claims(batch=message.batch, units=units))
        case Goodbye():
            return pb.NodeMessage(goodbye=pb.Goodbye(reason=message.reason))


def read_node_message(message: pb.NodeMessage) -> NodeToHub:
    """Raises: HubProtocolError: empty, unknown, or with a field out of its limits."""
    return _read(message, _NODE_READERS)


def write_hub_message(message: HubToNode) -> pb.HubMessage:
    match message:
        case Welcome():
            return pb.HubMessage(welcome=_write_welcome(message))
        case HeartbeatAnswer():
            return pb.HubMessage(heartbeat_answer=_write_answer(message))
        case Assignment():
            return pb.HubMessage(assignment=_write_assignment(message))
        case TopologyGrant():
            grant = codec.write_topology(message.topology, message.certificates)
            return pb.HubMessage(topology=grant)
        case Release():
            release = pb.Release(job_id=message.job_id, epoch=message.epoch, reason=message.reason)
            return pb.HubMessage(release=release)
        case ClaimsAnswer():
            return pb.HubMessage(claims_answer=pb.ClaimsAnswer(batch=message.batch))
        case Rejected():
            return pb.HubMessage(rejected=pb.Rejected(code=message.code, reason=message.reason))


def read_hub_message(message: pb.HubMessage) -> HubToNode:
    """Raises: HubProtocolError: empty, unknown, or with a field out of its limits."""
    return _read(message, _HUB_READERS)


def _read(message: Any, readers: dict[str, Callable[[Any], M]]) -> M:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise HubProtocolError("a message without content, or of a kind that this version does not know")
    return readers[kind](getattr(message, kind))


def _read_register(message: pb.Register) -> Register:
    if len(message.running) > codec.MOST_RANKS:
        raise HubProtocolError(f"{len(message.running)} running ranks; at most {codec.MOST_RANKS} are allowed")
    running = tuple(codec.read_ref(ref) for ref in message.running)
    return Register(info=codec.read_node(message.node), running=running)


def _read_heartbeat(message: pb.Heartbeat) -> Heartbeat:
    info = codec.read_node(message.node) if message.HasField("node") else None
    return Heartbeat(sequence=message.sequence, info=info, accepting=message.accepting)


def _write_ready(ready: WorkerReady) -> pb.WorkerReadyMessage:
    return pb.WorkerReadyMessage(
        ref=codec.write_ref(ready.job_id, ready.epoch, ready.rank), port=ready.port, csr_pem=ready.csr_pem
    )


def _read_ready(message: pb.WorkerReadyMessage) -> WorkerReady:
    job_id, epoch, rank = codec.read_ref(message.ref)
    if not 1 <= message.port <= 65535:
        raise HubProtocolError(f"port={message.port}: expected 1 to 65535")
    csr = codec.read_text(message.csr_pem, "csr", codec.LONGEST_PEM)
    return WorkerReady(job_id=job_id, epoch=epoch, rank=rank, port=message.port, csr_pem=csr)


def _read_claims(message: pb.Claims) -> Claims:
    if len(message.units) > MAX_UNITS_PER_MESSAGE:
        raise HubProtocolError(f"{len(message.units)} units; at most {MAX_UNITS_PER_MESSAGE} are allowed")
    return Claims(batch=message.batch, units=tuple(codec.read_unit(unit) for unit in message.units))


def _read_goodbye(message: pb.Goodbye) -> Goodbye:
    return Goodbye(reason=codec.read_text(message.reason, "reason"))


def _write_welcome(welcome: Welcome) -> pb.Welcome:
    return pb.Welcome(
        node_id=welcome.node_id,
        node_credential=welcome.credential,
        generation=welcome.generation,
        heartbeat_seconds=welcome.heartbeat_seconds,
        hubs=welcome.hubs,
    )


def _read_welcome(message: pb.Welcome) -> Welcome:
    if not 0.01 <= message.heartbeat_seconds <= 600:
        raise HubProtocolError(f"heartbeat_seconds={message.heartbeat_seconds}: expected 0.01 to 600")
    return Welcome(
        node_id=NodeId(codec.read_name(message.node_id, "node_id")),
        credential=codec.read_text(message.node_credential, "credential", 256),
        generation=Generation(message.generation),
        heartbeat_seconds=message.heartbeat_seconds,
        hubs=_read_hubs(message),
    )


def _read_hubs(message: pb.Welcome) -> tuple[str, ...]:
    if len(message.hubs) > 1 + MOST_OTHERS:
        raise HubProtocolError(f"{len(message.hubs)} addresses of hubs; at most {1 + MOST_OTHERS} are allowed")
    try:
        return tuple(str(parse_address(text)) for text in message.hubs)
    except ConfigError as error:
        raise HubProtocolError(str(error)) from error


def _write_answer(answer: HeartbeatAnswer) -> pb.HeartbeatAnswer:
    return pb.HeartbeatAnswer(
        sequence=answer.sequence,
        generation=answer.generation,
        earnings=codec.write_earnings(answer.earnings),
        hub_time=answer.hub_time,
    )


def _read_answer(message: pb.HeartbeatAnswer) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        sequence=message.sequence,
        generation=Generation(message.generation),
        earnings=codec.read_earnings(message.earnings),
        hub_time=message.hub_time,
    )


def _write_assignment(assignment: Assignment) -> pb.AssignmentMessage:
    return pb.AssignmentMessage(
        job_id=assignment.job_id,
        job_name=assignment.job_name,
        epoch=assignment.epoch,
        rank=assignment.rank,
        parallel=codec.write_parallel(assignment.parallel),
        device_id=assignment.device_id,
        worker_id=assignment.worker_id,
        continues=assignment.continues,
    )


def _read_assignment(message: pb.AssignmentMessage) -> Assignment:
    return Assignment(
        job_id=JobId(codec.read_name(message.job_id, "job_id")),
        job_name=codec.read_name(message.job_name, "job_name"),
        epoch=Epoch(message.epoch),
        rank=Rank(message.rank),
        parallel=codec.read_parallel(message.parallel),
        device_id=DeviceId(codec.read_text(message.device_id, "device_id", 128)),
        worker_id=WorkerId(codec.read_name(message.worker_id, "worker_id")),
        continues=Rank(message.continues) if message.HasField("continues") else None,
    )


def _read_topology(message: pb.TopologyMessage) -> TopologyGrant:
    certificates = tuple(codec.read_certificate(certificate) for certificate in message.certificates)
    return TopologyGrant(topology=codec.read_topology(message), certificates=certificates)


def _read_release(message: pb.Release) -> Release:
    job_id = JobId(codec.read_name(message.job_id, "job_id"))
    return Release(job_id=job_id, epoch=Epoch(message.epoch), reason=codec.read_text(message.reason, "reason"))


def _read_claims_answer(message: pb.ClaimsAnswer) -> ClaimsAnswer:
    return ClaimsAnswer(batch=message.batch)


def _read_rejected(message: pb.Rejected) -> Rejected:
    return Rejected(code=codec.read_name(message.code, "code"), reason=codec.read_text(message.reason, "reason"))


_NODE_READERS: dict[str, Callable[[Any], NodeToHub]] = {
    "register": _read_register,
    "heartbeat": _read_heartbeat,
    "worker_ready": _read_ready,
    "worker_change": codec.read_change,
    "claims": _read_claims,
    "goodbye": _read_goodbye,
}
_HUB_READERS: dict[str, Callable[[Any], HubToNode]] = {
    "welcome": _read_welcome,
    "heartbeat_answer": _read_answer,
    "assignment": _read_assignment,
    "topology": _read_topology,
    "release": _read_release,
    "claims_answer": _read_claims_answer,
    "rejected": _read_rejected,
}
