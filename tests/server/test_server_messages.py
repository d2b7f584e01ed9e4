from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import assignment, certificate, topology

from distensor.core.control import DeviceKind
from distensor_server.messages import (
    Claim,
    Connected,
    Failed,
    Garbage,
    LinkBytes,
    Note,
    Progress,
    Ready,
    ReplicaBytes,
    assign_line,
    clean_text,
    drain_line,
    encode_line,
    parse_worker_line,
    topology_line,
)

PROGRESS: dict[str, Any] = {
    "type": "progress",
    "state": "training",
    "step": 3,
    "total_steps": None,
    "stages": [0, 2],
    "loss": 2.5,
    "tokens_per_second": 10,
    "compute_s": 0.1,
    "sync_s": 0,
    "wait_s": 0.0,
    "links": [
        {"peer": -1, "sent": 5, "received": 7},
        {"peer": 1, "sent": 5, "received": 7, "rtt_ms": 41.5, "rtt_age_s": 2, "path": "relay", "line_rate": 9},
    ],
    "rss": 1000,
}


def parse(value: Any) -> Any:
    return parse_worker_line(json.dumps(value).encode())


def test_every_message_of_the_protocol() -> None:
    assert parse({"type": "ready", "v": 1, "port": 4000, "csr": "pem"}) == Ready(port=4000, csr_pem="pem")
    assert parse({"type": "connected"}) == Connected()
    assert parse({"type": "claim", "step": 0, "micro_batches": 4}) == Claim(step=0, micro_batches=4)
    assert parse({"type": "event", "severity": "info", "text": "a\x1b[31m\nb"}) == Note(
        severity="info", text="a [31m b"
    )
    assert parse({"type": "failed", "code": "error", "message": "m"}) == Failed(code="error", message="m")
    assert parse(PROGRESS) == Progress(
        phase="training",
        step=3,
        total_steps=None,
        stages=(0, 2),
        loss=2.5,
        tokens_per_second=10.0,
        compute_s=0.1,
        sync_s=0.0,
        wait_s=0.0,
        links=(
            LinkBytes(peer=-1, sent=5, received=7),
            LinkBytes(peer=1, sent=5, received=7, rtt_ms=41.5, rtt_age_s=2.0, path="relay", line_rate=9),
        ),
        rss=1000,
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "Expecting value"),
        (b"hello", "Expecting value"),
        (b"[1]", "not a JSON object"),
        (b'{"type": "\xff"}', "decode"),
        (b"[" * 100_000, "recursion"),
        (b'{"type": "fly"}', "unknown type 'fly'"),
        (b'{"type": []}', "unhashable"),
        (b'{"type": "ready", "v": 2, "port": 1, "csr": ""}', "version 2"),
        (b'{"type": "ready", "v": 1, "port": 0, "csr": ""}', "port 0"),
        (b'{"type": "ready", "v": 1, "port": true, "csr": ""}', "port: True"),
        (b'{"type": "ready", "v": 1, "port": 1}', "csr: expected text"),
        (b'{"type": "claim", "step": 1, "micro_batches": 0}', "micro_batches 0"),
        (b'{"type": "claim", "step": -1, "micro_batches": 1}', "step: -1"),
        (b'{"type": "claim", "step": 1e3, "micro_batches": 1}', "step: 1000.0"),
        (b'{"type": "event", "severity": "loud", "text": ""}', "severity: 'loud'"),
    ],
)
def test_garbage_is_a_value_with_its_reason(line: bytes, reason: str) -> None:
    message = parse_worker_line(line)
    assert isinstance(message, Garbage)
    assert reason.lower() in message.reason.lower()


@pytest.mark.parametrize(
    "change",
    [
        {"state": "sleeping"},
        {"step": None},
        {"stages": 3},
        {"stages": [0.5]},
        {"loss": "low"},
        {"loss": True},
        {"compute_s": -1},
        {"compute_s": None},
        {"links": [1]},
        {"links": [{"peer": -2, "sent": 0, "received": 0}]},
        {"links": [{"peer": 0, "sent": -1, "received": 0}]},
        {"links": [{"peer": 0, "sent": 1, "received": 1}] * 5000},
        {"rss": 2**70},
        {"replicas": 3},
    ],
)
def test_progress_is_checked_field_by_field(change: dict[str, Any]) -> None:
    message = parse({**PROGRESS, **change})
    assert isinstance(message, Garbage)
    assert next(iter(change)) in message.reason


def test_what_replicas_cost_is_read_and_cleaned() -> None:
    found = {"how": "dis\x1b[31mtro", "up": 10, "down": 30, "ring": 4000}
    message = parse({**PROGRESS, "replicas": found})
    assert isinstance(message, Progress)
    assert message.replicas == ReplicaBytes(how="dis [31mtro", up=10, down=30, ring=4000)
    for change in ({"up": -1}, {"down": None}, {"ring": "4"}, {"how": 3}):
        assert isinstance(parse({**PROGRESS, "replicas": {**found, **change}}), Garbage)
    assert parse({**PROGRESS, "replicas": None}) == parse(PROGRESS)


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "-Infinity"])
def test_a_loss_that_is_no_number_is_not_available_and_never_zero(loss: str) -> None:
    message = parse_worker_line(json.dumps(PROGRESS).replace("2.5", loss).encode())
    assert isinstance(message, Progress)
    assert message.loss is None


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_raise(line: bytes) -> None:
    parse_worker_line(line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(PROGRESS)), JSON)
def test_no_field_makes_the_parser_raise(field: str, value: Any) -> None:
    message = parse({**PROGRESS, field: value})
    assert isinstance(message, Progress | Garbage | Connected)


@given(st.text())
def test_text_of_a_stranger_becomes_one_printable_line(text: str) -> None:
    assert clean_text(text).isprintable()
    assert len(clean_text("x" * 10_000)) == 2000


def test_what_the_worker_is_told() -> None:
    line = assign_line(assignment(1), device_kind=DeviceKind.CPU, listen_host="127.0.0.1", memory_limit=None, threads=2)
    assert json.loads(line) == {
        "type": "assign",
        "v": 1,
        "job": "j_1",
        "job_name": "tiny",
        "epoch": 1,
        "rank": 1,
        "parallel": {
            "data_parallel": 1,
            "tensor_parallel": 1,
            "pipeline_parallel": 2,
            "context_parallel": 1,
            "order": "tp-cp-pp-dp",
        },
        "device": {"kind": "cpu", "id": "cpu"},
        "listen_host": "127.0.0.1",
        "listen_ports": None,
        "memory_limit": None,
        "threads": 2,
    }
    assert json.loads(topology_line(topology(), certificate(1))) == {
        "type": "topology",
        "job": topology().job_id,
        "epoch": topology().epoch,
        "members": [
            {"rank": 0, "node": "n_1", "name": "node-1", "host": "127.0.0.1", "hosts": [], "port": 40000},
            {"rank": 1, "node": "n_2", "name": "node-2", "host": "127.0.0.1", "hosts": [], "port": 40001},
        ],
        "relay": "",
        "certificate": {"rank": 1, "certificate_pem": "pem", "authority_pem": "authority"},
    }
    assert drain_line(90) == b'{"type":"drain","seconds":90}\n'


def test_no_line_can_carry_nan() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encode_line({"loss": float("nan")})
