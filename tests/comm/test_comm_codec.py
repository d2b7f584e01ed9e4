"""Protobuf and back: equal values, and clear words for everything that is not."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from distensor.comm import codec
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
from distensor.comm.stream_codec import (
    read_hub_message,
    read_node_message,
    write_hub_message,
    write_node_message,
)
from distensor.core.control import (
    NOT_BENCHMARKED,
    Assignment,
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
    Topology,
    Unit,
    UnitKey,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.errors import HubProtocolError
from distensor.core.ids import DRIVER_RANK, Rank
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Unavailable
from distensor.hub.jobs import MOST_FURTHER_HOSTS
from distensor.proto import control_pb2 as pb

NAMES: Any = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
TEXTS: Any = st.text(max_size=100)
COUNTS: Any = st.integers(min_value=0, max_value=2**31)
EPOCHS: Any = st.integers(min_value=0, max_value=2**62)
SIZES = st.integers(min_value=1, max_value=4)
FLOATS = st.floats(allow_nan=False)
UNAVAILABLE = st.builds(Unavailable, reason=st.text(min_size=1, max_size=50))
BYTES = st.integers(min_value=0, max_value=2**62) | UNAVAILABLE
RATES = st.floats(min_value=1, max_value=1e20) | UNAVAILABLE
DEVICES = st.builds(
    DeviceInfo,
    device_id=st.text(min_size=1, max_size=20),
    kind=st.sampled_from(DeviceKind),
    name=TEXTS,
    slots=st.integers(min_value=0, max_value=256),
    memory_bytes=BYTES,
    free_bytes=BYTES,
    unusable=st.none() | TEXTS,
    uuid=st.text(max_size=60),
    matmul_flops=RATES,
    memory_bytes_per_second=RATES,
)
HOSTS = st.lists(st.text(max_size=20), max_size=codec.MOST_HOSTS).map(tuple)
NODES = st.builds(
    NodeInfo,
    name=NAMES,
    host=TEXTS,
    version=st.text(max_size=20),
    devices=st.lists(DEVICES, max_size=3, unique_by=lambda device: device.device_id).map(tuple),
    node_id=st.none() | NAMES,
    hosts=HOSTS,
)
PARALLELS = st.builds(
    ParallelConfig,
    data_parallel=SIZES,
    tensor_parallel=SIZES,
    pipeline_parallel=SIZES,
    context_parallel=SIZES,
    order=st.sampled_from(["tp-cp-pp-dp", "dp-pp-tp-cp"]),
)
REFS = st.tuples(NAMES, EPOCHS, COUNTS)
UNITS = st.builds(
    Unit,
    key=st.builds(UnitKey, job_id=NAMES, epoch=EPOCHS, step=EPOCHS, rank=COUNTS),
    micro_batches=st.integers(min_value=1, max_value=1_000_000),
)
CHANGES = st.builds(
    WorkerChange,
    job_id=NAMES,
    epoch=EPOCHS,
    rank=COUNTS,
    state=st.sampled_from(WorkerState),
    restarts=COUNTS,
    reason=TEXTS,
)
READIES = st.builds(
    WorkerReady,
    job_id=NAMES,
    epoch=EPOCHS,
    rank=COUNTS,
    port=st.integers(min_value=1, max_value=65535),
    csr_pem=TEXTS,
)
EARNINGS = st.builds(Earnings, confirmed_micro=EPOCHS, confirmed_units=EPOCHS, pending_units=EPOCHS)
CERTIFICATES = st.builds(
    Certificate, rank=st.integers(min_value=-1, max_value=1000), certificate_pem=TEXTS, authority_pem=TEXTS
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    parallel = draw(PARALLELS)
    node_id, name, hosts = draw(NAMES), draw(NAMES), draw(HOSTS)
    members = tuple(
        Member(rank=Rank(rank), node_id=node_id, node_name=name, host="h", port=rank + 1, hosts=hosts)
        for rank in range(parallel.world_size)
    )
    return Topology(
        job_id=draw(NAMES),
        job_name=draw(NAMES),
        epoch=draw(EPOCHS),
        parallel=parallel,
        members=members,
        relay=draw(TEXTS),
    )


NODE_MESSAGES = st.one_of(
    st.builds(Register, info=NODES, running=st.lists(REFS, max_size=3).map(tuple)),
    st.builds(Heartbeat, sequence=EPOCHS, info=st.none() | NODES, accepting=st.booleans()),
    READIES,
    CHANGES,
    st.builds(Claims, batch=EPOCHS, units=st.lists(UNITS, max_size=3).map(tuple)),
    st.builds(Goodbye, reason=TEXTS),
)
HUB_MESSAGES = st.one_of(
    st.builds(
        Welcome,
        node_id=NAMES,
        credential=TEXTS,
        generation=EPOCHS,
        heartbeat_seconds=st.floats(min_value=0.01, max_value=600),
    ),
    st.builds(HeartbeatAnswer, sequence=EPOCHS, generation=EPOCHS, earnings=EARNINGS, hub_time=FLOATS),
    st.builds(
        Assignment,
        job_id=NAMES,
        job_name=NAMES,
        epoch=EPOCHS,
        rank=COUNTS,
        parallel=PARALLELS,
        device_id=TEXTS,
        worker_id=NAMES,
    ),
    st.builds(TopologyGrant, topology=topologies(), certificates=st.lists(CERTIFICATES, max_size=2).map(tuple)),
    st.builds(Release, job_id=NAMES, epoch=EPOCHS, reason=TEXTS),
    st.builds(ClaimsAnswer, batch=EPOCHS),
    st.builds(Rejected, code=NAMES, reason=TEXTS),
)


@given(NODE_MESSAGES)
def test_a_node_message_survives_the_wire(message: NodeToHub) -> None:
    wire = write_node_message(message).SerializeToString()
    assert read_node_message(pb.NodeMessage.FromString(wire)) == message


@given(HUB_MESSAGES)
def test_a_hub_message_survives_the_wire(message: HubToNode) -> None:
    wire = write_hub_message(message).SerializeToString()
    assert read_hub_message(pb.HubMessage.FromString(wire)) == message


@given(
    st.builds(
        JobSpec,
        submission=NAMES,
        name=NAMES,
        parallel=PARALLELS,
        csr_pem=TEXTS,
        device_kinds=st.lists(st.sampled_from(DeviceKind), max_size=2).map(tuple),
    )
)
def test_a_job_specification_survives(spec: JobSpec) -> None:
    assert codec.read_spec(codec.write_spec(spec)) == spec


MESH_NODES = st.builds(
    MeshNode,
    info=NODES,
    connected=st.booleans(),
    free_slots=COUNTS,
    seconds_since_heartbeat=FLOATS | UNAVAILABLE,
    confirmed_micro=EPOCHS,
)


@given(st.builds(Mesh, generation=EPOCHS, nodes=st.lists(MESH_NODES, max_size=3).map(tuple)))
def test_a_mesh_survives(mesh: Mesh) -> None:
    assert codec.read_mesh(codec.write_mesh(mesh)) == mesh


@given(
    st.builds(
        JobUpdate,
        job_id=NAMES,
        state=st.sampled_from(JobState),
        epoch=EPOCHS,
        reason=TEXTS,
        topology=st.none() | topologies(),
        certificate=st.none() | CERTIFICATES,
        workers=st.lists(CHANGES, max_size=2).map(tuple),
    )
)
def test_a_job_update_survives(update: JobUpdate) -> None:
    assert codec.read_update(codec.write_update(update)) == update


@given(st.binary(max_size=300))
def test_any_bytes_give_a_message_or_a_clear_error(data: bytes) -> None:
    for kind, read in ((pb.NodeMessage, read_node_message), (pb.HubMessage, read_hub_message)):
        try:
            message = kind.FromString(data)
        except DecodeError:
            continue  # grpc answers this one itself
        with contextlib.suppress(HubProtocolError):
            read(message)  # type: ignore[operator]


@given(NODE_MESSAGES, st.data())
def test_a_damaged_message_gives_a_message_or_a_clear_error(message: NodeToHub, data: st.DataObject) -> None:
    wire = bytearray(write_node_message(message).SerializeToString())
    for _ in range(data.draw(st.integers(min_value=1, max_value=4))):
        wire[data.draw(st.integers(min_value=0, max_value=len(wire) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError, HubProtocolError):
        read_node_message(pb.NodeMessage.FromString(bytes(wire)))


REF = pb.JobRef(job_id="j", epoch=1, rank=0)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (pb.NodeMessage(), "without content"),
        (pb.NodeMessage(register=pb.Register()), "node name=''"),
        (pb.NodeMessage(register=pb.Register(node=pb.NodeDescription(name="a b"))), "'a b'"),
        (pb.NodeMessage(worker_ready=pb.WorkerReadyMessage(ref=REF, port=70_000)), "port=70000"),
        (pb.NodeMessage(worker_ready=pb.WorkerReadyMessage(ref=REF, port=1, csr_pem="x" * 20_000)), "csr has 20000"),
        (pb.NodeMessage(worker_change=pb.WorkerChangeMessage(ref=REF, state="flying")), "'flying'"),
        (pb.NodeMessage(claims=pb.Claims(units=[pb.Unit(job_id="j", micro_batches=0)])), "micro_batches=0"),
        (pb.NodeMessage(claims=pb.Claims(units=[pb.Unit(job_id="../etc", micro_batches=1)])), "'../etc'"),
        (pb.NodeMessage(claims=pb.Claims(units=[pb.Unit()] * 2001)), "2001 units"),
    ],
)
def test_a_message_out_of_its_limits_names_the_field(message: pb.NodeMessage, named: str) -> None:
    with pytest.raises(HubProtocolError) as caught:
        read_node_message(message)
    assert named in str(caught.value)


def test_a_node_of_an_earlier_version_has_no_benchmark() -> None:
    (device,) = codec.read_node(pb.NodeDescription(name="n", devices=[pb.Device(device_id="a", kind="cuda")])).devices
    assert device.matmul_flops == device.memory_bytes_per_second == NOT_BENCHMARKED
    assert device.uuid == ""


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    device = pb.Device(device_id="a", kind="cuda", matmul_flops=pb.MaybeDouble(number=rate))
    with pytest.raises(HubProtocolError, match="matmul_flops"):
        codec.read_node(pb.NodeDescription(name="n", devices=[device]))


def test_a_device_named_twice_is_refused() -> None:
    device = pb.Device(device_id="cuda:0", kind="cuda")
    with pytest.raises(HubProtocolError, match="same device twice"):
        codec.read_node(pb.NodeDescription(name="n", devices=[device, device]))


def test_a_mesh_of_billions_of_ranks_is_refused_before_anyone_counts_them() -> None:
    huge = pb.Parallel(
        data_parallel=2**31, tensor_parallel=2**31, pipeline_parallel=1, context_parallel=1, order="tp-cp-pp-dp"
    )
    with pytest.raises(HubProtocolError, match="ranks="):
        codec.read_parallel(huge)


def test_a_topology_with_a_missing_rank_is_refused() -> None:
    parallel = ParallelConfig(data_parallel=2)
    member = Member(rank=Rank(0), node_id="n", node_name="n", host="h", port=1)  # type: ignore[arg-type]
    topology = Topology(job_id="j", job_name="j", epoch=1, parallel=parallel, members=(member,))  # type: ignore[arg-type]
    with pytest.raises(HubProtocolError, match="2 ranks"):
        codec.read_topology(codec.write_topology(topology))


def test_further_addresses_beyond_the_limits_are_refused() -> None:
    node = NodeInfo(name="a", host="h", version="1", devices=(), hosts=("h",) * (codec.MOST_HOSTS + 1))
    with pytest.raises(HubProtocolError, match="further addresses"):
        codec.read_node(codec.write_node(node))
    long = replace(node, hosts=("h" * (codec.LONGEST_HOST + 1),))
    with pytest.raises(HubProtocolError, match="further address"):
        codec.read_node(codec.write_node(long))


def test_the_driver_has_a_certificate_of_rank_minus_one() -> None:
    certificate = Certificate(rank=DRIVER_RANK, certificate_pem="c", authority_pem="a")
    assert codec.read_certificate(codec.write_certificate(certificate)) == certificate


def test_the_largest_update_and_the_largest_batch_stay_below_the_limit() -> None:
    parallel = ParallelConfig(data_parallel=1024)
    further = ("h" * codec.LONGEST_HOST,) * MOST_FURTHER_HOSTS
    members = tuple(
        Member(rank=Rank(rank), node_id="n" * 40, node_name="n" * 63, host="h" * 60, port=65535, hosts=further)  # type: ignore[arg-type]
        for rank in range(1024)
    )
    topology = Topology(job_id="j" * 20, job_name="j" * 63, epoch=1, parallel=parallel, members=members)  # type: ignore[arg-type]
    workers = tuple(
        WorkerChange(
            job_id=topology.job_id,
            epoch=topology.epoch,
            rank=Rank(rank),
            state=WorkerState.EXITED,
            restarts=9,
            reason="r" * 5000,
        )
        for rank in range(1024)
    )
    update = JobUpdate(
        job_id=topology.job_id, state=JobState.RUNNING, epoch=topology.epoch, topology=topology, workers=workers
    )
    assert codec.write_update(update).ByteSize() < 1 << 20
    key = UnitKey(job_id=topology.job_id, epoch=topology.epoch, step=2**62, rank=Rank(1023))
    claims = Claims(batch=2**62, units=(Unit(key=key, micro_batches=1_000_000),) * 2000)
    assert write_node_message(claims).ByteSize() < 1 << 20
