"""Protobuf <-> the values of `distensor.core.control` and `comm.messages`.

Everything that arrives is checked here: what comes out of a `read_*` function has valid names, known words and
sizes within limits, or `HubProtocolError` names the field and what was in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from distensor.comm.messages import JobRef
from distensor.comm.terms_codec import read_terms, write_terms
from distensor.core.control import (
    NOT_BENCHMARKED,
    Certificate,
    DeviceInfo,
    DeviceKind,
    Earnings,
    JobSpec,
    JobState,
    JobUpdate,
    Member,
    Mesh,
    MeshNode,
    NodeInfo,
    Reconfiguration,
    TakeOver,
    Topology,
    Unit,
    UnitKey,
    WorkerChange,
    WorkerState,
)
from distensor.core.errors import ConfigError, HubProtocolError
from distensor.core.ids import DeviceId, Epoch, Generation, JobId, NodeId, Rank, is_valid_name
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Reading, Unavailable
from distensor.proto import control_pb2 as pb

E = TypeVar("E", DeviceKind, JobState, WorkerState)

LONGEST_TEXT = 1024
MOST_RATE = 1e24
MOST_HOSTS = 8
LONGEST_HOST = 64
"""Of a further address: the topology of a thousand ranks has to stay below the largest message."""
MOST_DEVICES = 64
MOST_SLOTS = 256
MOST_RANKS = 1024
MOST_AGGREGATORS = 64
LONGEST_PEM = 16_384
LONGEST_REASON_IN_UPDATE = 200
"""An update repeats the reason of every rank, and has to stay below 1 MB."""


def read_name(text: str, field: str) -> str:
    if not is_valid_name(text):
        raise HubProtocolError(f"{field}={text[:80]!r}: expected 1 to 63 letters, digits, '.', '_' or '-'")
    return text


def read_text(text: str, field: str, longest: int = LONGEST_TEXT) -> str:
    if len(text) > longest:
        raise HubProtocolError(f"{field} has {len(text)} characters; at most {longest} are allowed")
    return text


def _read_count(value: int, field: str, lowest: int, highest: int) -> int:
    if not lowest <= value <= highest:
        raise HubProtocolError(f"{field}={value}: expected {lowest} to {highest}")
    return value


def read_word(kind: type[E], text: str, field: str) -> E:
    try:
        return kind(text)
    except ValueError as error:
        known = ", ".join(kind)
        raise HubProtocolError(f"{field}={text[:80]!r}: expected one of {known}") from error


def write_parallel(config: ParallelConfig) -> pb.Parallel:
    return pb.Parallel(
        data_parallel=config.data_parallel,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        context_parallel=config.context_parallel,
        order=config.order,
    )


def read_parallel(message: pb.Parallel) -> ParallelConfig:
    try:
        config = ParallelConfig(
            data_parallel=message.data_parallel,
            tensor_parallel=message.tensor_parallel,
            pipeline_parallel=message.pipeline_parallel,
            context_parallel=message.context_parallel,
            order=read_text(message.order, "order", 64),
        )
    except ConfigError as error:
        raise HubProtocolError(str(error)) from error
    _read_count(config.world_size, "ranks", 1, MOST_RANKS)
    return config


def _write_int(reading: Reading[int]) -> pb.MaybeInt:
    if isinstance(reading, Unavailable):
        return pb.MaybeInt(unavailable=reading.reason)
    return pb.MaybeInt(number=reading)


def _read_int(message: pb.MaybeInt) -> Reading[int]:
    if message.WhichOneof("value") == "number":
        return message.number
    return Unavailable(reason=read_text(message.unavailable, "unavailable") or "not reported")


def _write_double(reading: Reading[float]) -> pb.MaybeDouble:
    if isinstance(reading, Unavailable):
        return pb.MaybeDouble(unavailable=reading.reason)
    return pb.MaybeDouble(number=reading)


def _read_double(message: pb.MaybeDouble) -> Reading[float]:
    if message.WhichOneof("value") == "number":
        return message.number
    return Unavailable(reason=read_text(message.unavailable, "unavailable") or "not reported")


def _write_device(device: DeviceInfo) -> pb.Device:
    return pb.Device(
        device_id=device.device_id,
        kind=device.kind.value,
        name=device.name,
        slots=device.slots,
        memory_bytes=_write_int(device.memory_bytes),
        free_bytes=_write_int(device.free_bytes),
        unusable=device.unusable,
        uuid=device.uuid,
        matmul_flops=_write_double(device.matmul_flops),
        memory_bytes_per_second=_write_double(device.memory_bytes_per_second),
    )


def _read_device(message: pb.Device) -> DeviceInfo:
    unusable = read_text(message.unusable, "unusable") if message.HasField("unusable") else None
    return DeviceInfo(
        device_id=DeviceId(read_text(message.device_id, "device_id", 128)),
        kind=read_word(DeviceKind, message.kind, "device kind"),
        name=read_text(message.name, "device name"),
        slots=_read_count(message.slots, "slots", 0, MOST_SLOTS),
        memory_bytes=_read_int(message.memory_bytes),
        free_bytes=_read_int(message.free_bytes),
        unusable=unusable,
        uuid=read_text(message.uuid, "device uuid", 128),
        matmul_flops=_read_rate(message.matmul_flops, "matmul_flops"),
        memory_bytes_per_second=_read_rate(message.memory_bytes_per_second, "memory_bytes_per_second"),
    )


def _read_rate(message: pb.MaybeDouble, name: str) -> Reading[float]:
    """Nodes of an earlier version do not send it."""
    found = _read_double(message) if message.WhichOneof("value") else NOT_BENCHMARKED
    if not isinstance(found, Unavailable) and not 0 < found < MOST_RATE:
        raise HubProtocolError(f"{name}={found}: expected a rate over 0")
    return found


def write_node(info: NodeInfo) -> pb.NodeDescription:
    return pb.NodeDescription(
        name=info.name,
        host=info.host,
        version=info.version,
        devices=[_write_device(device) for device in info.devices],
        node_id=info.node_id,
        hosts=info.hosts,
    )


def read_node(message: pb.NodeDescription) -> NodeInfo:
    _read_count(len(message.devices), "number of devices", 0, MOST_DEVICES)
    devices = tuple(_read_device(device) for device in message.devices)
    if len({device.device_id for device in devices}) != len(devices):
        raise HubProtocolError(f"node {message.name[:80]!r} names the same device twice")
    return NodeInfo(
        name=read_name(message.name, "node name"),
        host=read_text(message.host, "host", 255),
        version=read_text(message.version, "version", 64),
        devices=devices,
        node_id=NodeId(read_name(message.node_id, "node_id")) if message.HasField("node_id") else None,
        hosts=_read_hosts(message.hosts),
    )


def _read_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    _read_count(len(hosts), "number of further addresses", 0, MOST_HOSTS)
    return tuple(read_text(host, "further address", LONGEST_HOST) for host in hosts)


def write_ref(job_id: JobId, epoch: Epoch, rank: Rank) -> pb.JobRef:
    return pb.JobRef(job_id=job_id, epoch=epoch, rank=rank)


def read_ref(message: pb.JobRef) -> JobRef:
    return JobId(read_name(message.job_id, "job_id")), Epoch(message.epoch), Rank(message.rank)


def write_unit(unit: Unit) -> pb.Unit:
    key = unit.key
    return pb.Unit(
        job_id=key.job_id,
        epoch=key.epoch,
        step=key.step,
        rank=key.rank,
        micro_batches=unit.micro_batches,
    )


def read_unit(message: pb.Unit) -> Unit:
    key = UnitKey(
        job_id=JobId(read_name(message.job_id, "job_id")),
        epoch=Epoch(_read_count(message.epoch, "epoch", 0, (1 << 63) - 1)),
        step=_read_count(message.step, "step", 0, (1 << 63) - 1),
        rank=Rank(message.rank),
    )
    return Unit(key=key, micro_batches=_read_count(message.micro_batches, "micro_batches", 1, 1_000_000))


def write_change(change: WorkerChange, longest: int = LONGEST_TEXT) -> pb.WorkerChangeMessage:
    return pb.WorkerChangeMessage(
        ref=write_ref(change.job_id, change.epoch, change.rank),
        state=change.state.value,
        restarts=change.restarts,
        reason=change.reason[:longest],
    )


def read_change(message: pb.WorkerChangeMessage) -> WorkerChange:
    job_id, epoch, rank = read_ref(message.ref)
    return WorkerChange(
        job_id=job_id,
        epoch=epoch,
        rank=rank,
        state=read_word(WorkerState, message.state, "worker state"),
        restarts=message.restarts,
        reason=read_text(message.reason, "reason"),
    )


def write_topology(topology: Topology, certificates: Iterable[Certificate] = ()) -> pb.TopologyMessage:
    return pb.TopologyMessage(
        job_id=topology.job_id,
        job_name=topology.job_name,
        epoch=topology.epoch,
        parallel=write_parallel(topology.parallel),
        members=[
            pb.MemberMessage(
                rank=member.rank,
                node_id=member.node_id,
                node_name=member.node_name,
                host=member.host,
                port=member.port,
                hosts=member.hosts,
            )
            for member in topology.members
        ],
        certificates=[write_certificate(certificate) for certificate in certificates],
        relay=topology.relay,
    )


def read_topology(message: pb.TopologyMessage) -> Topology:
    topology = Topology(
        job_id=JobId(read_name(message.job_id, "job_id")),
        job_name=read_name(message.job_name, "job_name"),
        epoch=Epoch(message.epoch),
        parallel=read_parallel(message.parallel),
        members=tuple(_read_member(member) for member in message.members),
        relay=read_text(message.relay, "relay", 300),
    )
    count, world = len(topology.members), topology.parallel.world_size
    in_order = [member.rank for member in topology.members] == list(range(count))
    if not in_order or not world <= count <= world + MOST_AGGREGATORS:
        raise HubProtocolError(
            f"the topology of job {topology.job_id} does not name each of its {world} ranks, and at most "
            f"{MOST_AGGREGATORS} aggregators after them, once and in order"
        )
    return topology


def _read_member(message: pb.MemberMessage) -> Member:
    return Member(
        rank=Rank(message.rank),
        node_id=NodeId(read_name(message.node_id, "node_id")),
        node_name=read_name(message.node_name, "node_name"),
        host=read_text(message.host, "host", 255),
        port=_read_count(message.port, "port", 1, 65535),
        hosts=_read_hosts(message.hosts),
    )


def write_certificate(certificate: Certificate) -> pb.CertificateMessage:
    return pb.CertificateMessage(
        rank=certificate.rank,
        certificate_pem=certificate.certificate_pem,
        authority_pem=certificate.authority_pem,
    )


def read_certificate(message: pb.CertificateMessage) -> Certificate:
    return Certificate(
        rank=Rank(message.rank),
        certificate_pem=read_text(message.certificate_pem, "certificate", LONGEST_PEM),
        authority_pem=read_text(message.authority_pem, "authority", LONGEST_PEM),
    )


def write_earnings(earnings: Earnings) -> pb.EarningsMessage:
    return pb.EarningsMessage(
        confirmed_micro=earnings.confirmed_micro,
        confirmed_units=earnings.confirmed_units,
        pending_units=earnings.pending_units,
    )


def read_earnings(message: pb.EarningsMessage) -> Earnings:
    return Earnings(
        confirmed_micro=message.confirmed_micro,
        confirmed_units=message.confirmed_units,
        pending_units=message.pending_units,
    )


def write_mesh(mesh: Mesh) -> pb.MeshReply:
    return pb.MeshReply(
        generation=mesh.generation,
        nodes=[
            pb.MeshNodeMessage(
                node=write_node(node.info),
                connected=node.connected,
                free_slots=node.free_slots,
                seconds_since_heartbeat=_write_double(node.seconds_since_heartbeat),
                confirmed_micro=node.confirmed_micro,
            )
            for node in mesh.nodes
        ],
        terms=write_terms(mesh.terms),
    )


def read_mesh(message: pb.MeshReply) -> Mesh:
    return Mesh(
        generation=Generation(message.generation),
        nodes=tuple(
            MeshNode(
                info=read_node(node.node),
                connected=node.connected,
                free_slots=node.free_slots,
                seconds_since_heartbeat=_read_double(node.seconds_since_heartbeat),
                confirmed_micro=node.confirmed_micro,
            )
            for node in message.nodes
        ),
        terms=read_terms(message),
    )


def write_spec(spec: JobSpec) -> pb.SubmitJobRequest:
    return pb.SubmitJobRequest(
        submission=spec.submission,
        name=spec.name,
        parallel=write_parallel(spec.parallel),
        csr_pem=spec.csr_pem,
        bytes_per_rank=spec.bytes_per_rank,
        device_kinds=[kind.value for kind in spec.device_kinds],
        aggregators=spec.aggregators,
        split_tensor=spec.split_tensor,
        wait=spec.wait,
        priority=spec.priority,
        steps=spec.steps,
        micro_batches=spec.micro_batches,
    )


def read_spec(message: pb.SubmitJobRequest) -> JobSpec:
    parallel = read_parallel(message.parallel)
    if message.bytes_per_rank and len(message.bytes_per_rank) != parallel.world_size:
        raise HubProtocolError(
            f"bytes_per_rank has {len(message.bytes_per_rank)} entries for {parallel.world_size} ranks"
        )
    return JobSpec(
        submission=read_name(message.submission, "submission"),
        name=read_name(message.name, "job name"),
        parallel=parallel,
        csr_pem=read_text(message.csr_pem, "csr", LONGEST_PEM),
        bytes_per_rank=tuple(message.bytes_per_rank),
        device_kinds=tuple(read_word(DeviceKind, kind, "device kind") for kind in message.device_kinds),
        aggregators=_read_aggregators(message.aggregators),
        split_tensor=message.split_tensor,
        wait=message.wait,
        priority=message.priority,
        steps=message.steps,
        micro_batches=message.micro_batches,
    )


def _read_aggregators(names: Sequence[str]) -> tuple[str, ...]:
    _read_count(len(names), "number of aggregators", 0, MOST_AGGREGATORS)
    return tuple(name and read_name(name, "node of an aggregator") for name in names)


def write_reconfiguration(change: Reconfiguration) -> pb.ReconfigureJobRequest:
    return pb.ReconfigureJobRequest(
        job_id=change.job_id,
        request=change.request,
        epoch=change.epoch,
        parallel=write_parallel(change.parallel),
        continues=[-1 if rank is None else rank for rank in change.continues],
        csr_pem=change.csr_pem,
        bytes_per_rank=change.bytes_per_rank,
        aggregators=change.aggregators,
    )


def read_reconfiguration(message: pb.ReconfigureJobRequest) -> Reconfiguration:
    parallel = read_parallel(message.parallel)
    for name, values in (("continues", message.continues), ("bytes_per_rank", message.bytes_per_rank)):
        if len(values) != parallel.world_size and (values or name == "continues"):
            raise HubProtocolError(f"{name} has {len(values)} entries for {parallel.world_size} ranks")
    kept = [rank for rank in message.continues if rank >= 0]
    if len(set(kept)) != len(kept):
        raise HubProtocolError(f"continues={list(message.continues)[:20]}: a rank goes on as two")
    return Reconfiguration(
        job_id=JobId(read_name(message.job_id, "job_id")),
        request=read_name(message.request, "request"),
        epoch=Epoch(message.epoch),
        parallel=parallel,
        continues=tuple(None if rank < 0 else Rank(rank) for rank in message.continues),
        csr_pem=read_text(message.csr_pem, "csr", LONGEST_PEM),
        bytes_per_rank=tuple(message.bytes_per_rank),
        aggregators=_read_aggregators(message.aggregators),
    )


def write_take_over(taken: TakeOver) -> pb.TakeOverJobRequest:
    return pb.TakeOverJobRequest(job_id=taken.job_id, request=taken.request, csr_pem=taken.csr_pem)


def read_take_over(message: pb.TakeOverJobRequest) -> TakeOver:
    return TakeOver(
        job_id=JobId(read_name(message.job_id, "job_id")),
        request=read_name(message.request, "request"),
        csr_pem=read_text(message.csr_pem, "csr", LONGEST_PEM),
    )


def write_update(update: JobUpdate) -> pb.JobUpdateMessage:
    return pb.JobUpdateMessage(
        job_id=update.job_id,
        state=update.state.value,
        epoch=update.epoch,
        reason=update.reason[:LONGEST_TEXT],
        topology=None if update.topology is None else write_topology(update.topology),
        certificate=None if update.certificate is None else write_certificate(update.certificate),
        workers=[write_change(change, LONGEST_REASON_IN_UPDATE) for change in update.workers],
    )


def read_update(message: pb.JobUpdateMessage) -> JobUpdate:
    return JobUpdate(
        job_id=JobId(read_name(message.job_id, "job_id")),
        state=read_word(JobState, message.state, "job state"),
        epoch=Epoch(message.epoch),
        reason=read_text(message.reason, "reason"),
        topology=read_topology(message.topology) if message.HasField("topology") else None,
        certificate=read_certificate(message.certificate) if message.HasField("certificate") else None,
        workers=tuple(read_change(change) for change in message.workers),
    )


def write_receipts(units: Iterable[Unit], different: Iterable[Unit] = ()) -> pb.ReportUnitsRequest:
    return pb.ReportUnitsRequest(
        units=[write_unit(unit) for unit in units], different=[write_unit(unit) for unit in different]
    )


def write_watch(job_id: JobId) -> pb.WatchJobRequest:
    return pb.WatchJobRequest(job_id=job_id)


def write_end(job_id: JobId, state: JobState, reason: str, epoch: Epoch | None = None) -> pb.EndJobRequest:
    return pb.EndJobRequest(job_id=job_id, state=state.value, reason=reason[:LONGEST_TEXT], epoch=epoch or 0)


def read_job_state(text: str) -> JobState:
    return read_word(JobState, text, "job state")
