"""Decoders of the control plane: tokens, credentials, certificates, and the messages of hub, nodes and trainers."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography import x509
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from distensor.comm import codec, job_codec, keys, progress_codec, statement_codec, stream_codec
from distensor.comm.address import parse_address
from distensor.comm.credential import NodeCredential, load_credential, save_credential
from distensor.comm.identity import new_key_and_csr
from distensor.comm.keys import KeyKind, decode_key
from distensor.comm.messages import (
    Claims,
    ClaimsAnswer,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Register,
    Rejected,
    Release,
    TopologyGrant,
    Welcome,
)
from distensor.comm.relay_words import NONCE_BYTES, read_line, read_nonce, read_wish, write_line, write_wish
from distensor.comm.relay_words import VERSION as RELAY_VERSION
from distensor.comm.relay_words import Role as RelayRole
from distensor.comm.server import read_bearer
from distensor.comm.tokens import JoinToken, Role, decode_node_token, decode_token
from distensor.core.control import (
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
    Reconfiguration,
    TakeOver,
    Topology,
    Unit,
    UnitKey,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.ids import DeviceId, Epoch, Generation, JobId, NodeId, Rank, WorkerId, parse_data_plane_uri
from distensor.core.job_report import JobQuery, JobReport, JobsPage, JobSummary, PassedNode, PlacedRank
from distensor.core.parallel import ParallelConfig
from distensor.core.progress import StepProgress
from distensor.core.reading import Unavailable
from distensor.core.statement import (
    HubUnit,
    RowKey,
    Statement,
    StatementQuery,
    StatementRow,
    UnitsPage,
    UnitsQuery,
    UnitState,
)
from distensor.hub.payouts.http_api import read_answer
from distensor.hub.payouts.secret import Secret
from distensor.hub.payouts.stripe import read_transfer
from distensor.hub.payouts.webhooks import Webhooks, signature
from distensor.hub.pki import Authority
from distensor.proto import control_pb2 as pb
from distensor.testing.clock import FakeClock
from distensor.testing.fuzzing import Decoder
from distensor.transport.identity import peer_identity, server_context
from distensor.transport.types import Credentials

JOB, EPOCH, RANK = JobId("j_0123456789abcdef"), Epoch(3), Rank(1)
PARALLEL = ParallelConfig(data_parallel=2)
_NOTHING = Unavailable(reason="not measured")


def _device() -> DeviceInfo:
    return DeviceInfo(
        device_id=DeviceId("cpu"), kind=DeviceKind.CPU, name="a CPU", slots=2, memory_bytes=1 << 34,
        free_bytes=_NOTHING, matmul_flops=1e11, memory_bytes_per_second=_NOTHING,
    )  # fmt: skip


INFO = NodeInfo(name="atlas-1", host="192.0.2.7", version="0.1.0", devices=(_device(),), node_id=NodeId("n_1"))
UNIT = Unit(key=UnitKey(job_id=JOB, epoch=EPOCH, step=7, rank=RANK), micro_batches=4)
MEMBERS = tuple(
    Member(rank=Rank(rank), node_id=NodeId("n_1"), node_name="atlas-1", host="192.0.2.7", port=40_000 + rank)
    for rank in range(2)
)
TOPOLOGY = Topology(job_id=JOB, job_name="tiny", epoch=EPOCH, parallel=PARALLEL, members=MEMBERS, relay="192.0.2.1:443")
CERTIFICATE = Certificate(rank=RANK, certificate_pem="certificate", authority_pem="authority")
CHANGE = WorkerChange(job_id=JOB, epoch=EPOCH, rank=RANK, state=WorkerState.EXITED, restarts=1, reason="killed")
EARNINGS = Earnings(confirmed_micro=5000, confirmed_units=5, pending_units=1)
ROW = RowKey(hour=480_000, job_id=JOB, epoch=EPOCH, rank=RANK)
UNITS_QUERY = UnitsQuery(job_id=JOB, epoch=EPOCH, rank=RANK)
KEY = KeyKind.TRAINER.prefix + "a1B2" * 10 + "xyz"
KEY += keys._checksum(KEY)
TOKEN = JoinToken(address=parse_address("192.0.2.1:50051"), fingerprint="ab" * 32, role=Role.NODE, secret="s" * 32)

NODE_MESSAGES = (
    Register(info=INFO, running=((JOB, EPOCH, RANK),)),
    Heartbeat(sequence=4, info=INFO),
    WorkerReady(job_id=JOB, epoch=EPOCH, rank=RANK, port=40_001, csr_pem="request"),
    CHANGE,
    Claims(batch=2, units=(UNIT, UNIT)),
    Goodbye(reason="update"),
)
HUB_MESSAGES = (
    Welcome(node_id=NodeId("n_1"), credential="c" * 32, generation=Generation(2), heartbeat_seconds=2.0),
    HeartbeatAnswer(sequence=4, generation=Generation(2), earnings=EARNINGS, hub_time=1.7e9),
    Assignment(
        job_id=JOB, job_name="tiny", epoch=EPOCH, rank=RANK, parallel=PARALLEL, device_id=DeviceId("cpu"),
        worker_id=WorkerId("w"),
    ),
    TopologyGrant(topology=TOPOLOGY, certificates=(CERTIFICATE,)),
    Release(job_id=JOB, epoch=EPOCH, reason="finished"),
    ClaimsAnswer(batch=2),
    Rejected(code="replaced", reason="again"),
)  # fmt: skip


def wire(kind: type[Any], read: Callable[[Any], object], *seeds: Message) -> list[Decoder]:
    """A reader of protobuf messages, with damaged bytes and with damaged fields.

    Bytes that are no message are refused by gRPC, which ends the call with a status.
    """

    def by_bytes(data: bytes) -> object:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return None
        return read(message)

    def by_fields(data: bytes) -> object:
        message = kind()
        try:
            json_format.Parse(data, message, ignore_unknown_fields=True)
        except (json_format.ParseError, ValueError, TypeError, RecursionError, AttributeError):
            return None  # protobuf would not let such a field onto the wire
        return read(message)

    name = f"{read.__module__.removeprefix('distensor.')}:{read.__name__}"
    texts = tuple(json_format.MessageToJson(seed, preserving_proto_field_name=True).encode() for seed in seeds)
    return [
        Decoder(name=name, decode=by_bytes, seeds=tuple(seed.SerializeToString() for seed in seeds)),
        Decoder(name=name, decode=by_fields, seeds=texts, cost=4),
    ]


def text(name: str, read: Callable[[str], object], *seeds: str) -> Decoder:
    return Decoder(
        name=name,
        decode=lambda data: read(data.decode("utf-8", "surrogateescape")),
        seeds=tuple(seed.encode() for seed in seeds),
    )


def _read_page(message: pb.UnitsReply) -> object:
    return statement_codec.read_units(message, UNITS_QUERY)


_read_page.__module__, _read_page.__name__ = statement_codec.__name__, "read_units"


def messages() -> list[Decoder]:
    mesh = Mesh(
        generation=Generation(2),
        nodes=(MeshNode(info=INFO, connected=True, free_slots=2, seconds_since_heartbeat=_NOTHING),),
    )
    spec = JobSpec(submission="s", name="tiny", parallel=PARALLEL, csr_pem="request", bytes_per_rank=(1, 2))
    change = Reconfiguration(
        job_id=JOB,
        request="r",
        epoch=EPOCH,
        parallel=PARALLEL,
        continues=(Rank(1), None),
        csr_pem="request",
    )
    taken = TakeOver(job_id=JOB, request="r1", csr_pem="request")
    update = JobUpdate(
        job_id=JOB, state=JobState.RUNNING, epoch=EPOCH, topology=TOPOLOGY, certificate=CERTIFICATE, workers=(CHANGE,)
    )
    page = UnitsPage(
        units=(HubUnit(key=UNIT.key, state=UnitState.CREDITED, claimed=4, received=None, micro=4000),), more=True
    )
    row = StatementRow(key=ROW, device_id=DeviceId("cpu"), units=5, micro=5000)
    c, s, f = codec, statement_codec, stream_codec
    return [
        *wire(pb.NodeMessage, f.read_node_message, *map(f.write_node_message, NODE_MESSAGES)),
        *wire(pb.HubMessage, f.read_hub_message, *map(f.write_hub_message, HUB_MESSAGES)),
        *wire(pb.MeshReply, c.read_mesh, c.write_mesh(mesh)),
        *wire(pb.SubmitJobRequest, c.read_spec, c.write_spec(spec)),
        *wire(pb.ReconfigureJobRequest, c.read_reconfiguration, c.write_reconfiguration(change)),
        *wire(pb.TakeOverJobRequest, c.read_take_over, c.write_take_over(taken)),
        *wire(pb.JobUpdateMessage, c.read_update, c.write_update(update)),
        *wire(pb.StatementRequest, s.read_query, s.write_query(StatementQuery(since_hour=1, after=ROW, most=10))),
        *wire(
            pb.StatementReply,
            s.read_statement,
            s.write_statement(Statement(rows=(row, row), more=False, earnings=EARNINGS)),
        ),
        *wire(pb.UnitsRequest, s.read_units_query, s.write_units_query(UNITS_QUERY)),
        *wire(pb.UnitsReply, _read_page, s.write_units(page)),
        *job_messages(),
        text("comm.codec:read_job_state", c.read_job_state, "running", "finished"),
    ]


def job_messages() -> list[Decoder]:
    job = JobSummary(
        job_id=JOB,
        name="tiny",
        owner="main",
        state=JobState.QUEUED,
        epoch=EPOCH,
        parallel=PARALLEL,
        reason="no room",
        priority=1,
        position=2,
    )
    ranks = tuple(
        PlacedRank(rank=Rank(rank), node_id=NodeId("n_1"), node="atlas", device_id=DeviceId("cpu"), why="whole")
        for rank in range(job.workers)
    )
    report = JobReport(job=job, ranks=ranks, passed=(PassedNode(node="bolt", why="no free slot"),), missing="2 workers")
    step = StepProgress(step=7, loss=2.5, tokens=64, seconds=0.5, bytes_sent=100, bytes_received=200)
    c = job_codec
    return [
        *wire(pb.ListJobsRequest, c.read_query, c.write_query(JobQuery(ended=True, after=JOB, most=10))),
        *wire(pb.ListJobsReply, c.read_page, c.write_page(JobsPage(jobs=(job, job), more=True))),
        *wire(pb.ExplainJobReply, c.read_report, c.write_report(report)),
        *wire(
            pb.ReportProgressRequest, progress_codec.read_progress, progress_codec.write_progress(JOB, Epoch(2), [step])
        ),
    ]


def words() -> list[Decoder]:
    def bearer(value: str) -> object:
        return read_bearer([("authorization", value)])

    return [
        text("comm.tokens:decode_token", decode_token, TOKEN.encode()),
        text("comm.keys:decode_key", decode_key, KEY),
        text("comm.tokens:decode_node_token", decode_node_token, TOKEN.encode()),
        # The checksum stops nearly all damage; behind it the fields are read as they are here.
        text(
            "comm.tokens:_from_fields", _token_of_fields, f'{{"a":"h:1","f":"{"ab" * 32}","r":"node","s":"{"s" * 32}"}}'
        ),
        text("comm.address:parse_address", parse_address, "192.0.2.1:50051", "[::1]:50051"),
        text("comm.server:read_bearer", bearer, "Bearer node.n_1.secret", "Bearer join.secret"),
        text("core.ids:parse_data_plane_uri", parse_data_plane_uri, "distensor://j_1/3/-1", "distensor://j_1/3/12"),
    ]


def _token_of_fields(fields: str) -> object:
    """A token whose checksum is right, whatever stands in it."""
    import base64

    from distensor.comm import tokens

    body = base64.urlsafe_b64encode(fields.encode("utf-8", "surrogateescape")).decode().rstrip("=")
    return decode_token(tokens.PREFIX + body + tokens._checksum(body))


def files(folder: Path, authority: Authority) -> list[Decoder]:
    path = folder / "credential.json"
    kept = NodeCredential(
        node_id=NodeId("n_1"), address="192.0.2.1:50051", authority_pem=authority.authority_pem, secret="s" * 32
    )
    save_credential(path, kept)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return load_credential(path)

    return [Decoder(name="comm.credential:load_credential", decode=read, seeds=(path.read_bytes(),), cost=2)]


def certificates(folder: Path, authority: Authority) -> list[Decoder]:
    key, request = new_key_and_csr(JOB, EPOCH, RANK)
    signed = authority.sign(request, JOB, EPOCH, RANK)
    own = Credentials(key_pem=key, certificate_pem=signed, authority_pem=authority.authority_pem)
    context = server_context(own, FakeClock())
    path = folder / "peer.pem"

    def identity(data: bytes) -> object:
        path.write_bytes(data)
        # What OpenSSL makes of a certificate for `getpeercert`, without a connection around it.
        fields: Any = ssl._ssl._test_decode_cert  # type: ignore[attr-defined]
        tls: Any = SimpleNamespace(getpeercert=lambda: fields(str(path)), context=context)
        return peer_identity(tls)

    return [
        text("hub.pki:Authority.sign", lambda csr: authority.sign(csr, JOB, EPOCH, RANK), request),
        text("hub.pki:Authority.sign_anew", lambda old: authority.sign_anew(old, JOB, EPOCH, RANK), signed),
        Decoder(
            name="transport.identity:peer_identity",
            decode=identity,
            seeds=(signed.encode(), authority.sign_anew(signed, JOB, EPOCH, RANK).encode()),
            cost=2,
        ),
    ]


def relay(authority: Authority) -> list[Decoder]:
    """What a member says to a relay, and the other way round."""
    key, request = new_key_and_csr(JOB, EPOCH, RANK)
    issuer, nonce = x509.load_pem_x509_certificate(authority.authority_pem.encode()), b"n" * NONCE_BYTES
    wish = write_wish(RelayRole.DIAL, 0, nonce, authority.sign(request, JOB, EPOCH, RANK), key)
    now = FakeClock().now()
    return [
        Decoder(name="comm.relay_words:read_line", decode=read_line, seeds=(wish, write_line({"joined": True}))),
        Decoder(
            name="comm.relay_words:read_nonce",
            decode=lambda data: read_nonce(read_line(data)),
            seeds=(write_line({"v": RELAY_VERSION, "nonce": nonce.hex()}),),
        ),
        Decoder(
            name="comm.relay_words:read_wish",
            decode=lambda data: read_wish(data.rstrip(b"\n") + b"\n", nonce, issuer, now),
            seeds=(wish,),
            cost=2,
        ),
        Decoder(
            name="comm.relay_words:read_wish",
            decode=lambda data: read_wish(_with_certificate(wish, data), nonce, issuer, now),
            seeds=(authority.sign(request, JOB, EPOCH, RANK).encode(),),
            cost=2,
        ),
    ]


def _with_certificate(wish: bytes, certificate: bytes) -> bytes:
    return write_line({**json.loads(wish), "certificate": certificate.decode("latin-1")})


def payments() -> list[Decoder]:
    """What a payment service answers, and what it calls a hub with; the latter rightly signed, or with any header."""
    secret, clock = Secret("whsec_x"), FakeClock()
    at = int(clock.now())
    transfer = {"id": "tr_1", "amount": 7, "amount_reversed": 0, "currency": "eur", "destination": "acct_1"}
    body = json.dumps({**transfer, "transfer_group": "p1"}).encode()
    event = json.dumps({"id": "evt_1", "type": "transfer.created", "data": {"object": json.loads(body)}}).encode()

    def signed(data: bytes) -> object:
        return Webhooks([secret], clock).read_event(data, f"t={at},v1={signature(secret, at, data)}")

    def header(data: bytes) -> object:
        return Webhooks([secret], clock).read_event(event, data.decode("latin-1"))

    name, right = "hub.payouts.webhooks:Webhooks.read_event", f"t={at},v1={signature(secret, at, event)}"
    return [
        Decoder(name=name, decode=signed, seeds=(event,)),
        Decoder(name=name, decode=header, seeds=(right.encode(),)),
        Decoder(
            name="hub.payouts.http_api:read_answer", decode=lambda data: read_answer(200, data, "2"), seeds=(body,)
        ),
        text("hub.payouts.http_api:read_answer", lambda wait: read_answer(429, b"{}", wait), "2"),
        Decoder(
            name="hub.payouts.stripe:read_transfer",
            decode=lambda data: read_transfer(read_answer(200, data, "0").body, "p1"),
            seeds=(body,),
        ),
    ]


def decoders(folder: Path) -> list[Decoder]:
    """`folder`: an empty one of its own."""
    authority = Authority.load_or_create(folder, FakeClock())
    others = [*certificates(folder, authority), *relay(authority), *payments()]
    return [*messages(), *words(), *files(folder, authority), *others]
