"""The worker's side of the JSON lines."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from distensor.core.errors import ConfigError
from distensor.node.ipc import Emitter, FailureCode, Mailbox, parse_assignment, parse_line, parse_topology
from distensor.node.membership import MembershipDesk

ASSIGN: dict[str, Any] = {
    "type": "assign",
    "v": 1,
    "job": "j_1",
    "job_name": "llama",
    "epoch": 2,
    "rank": 1,
    "parallel": {
        "data_parallel": 2,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "order": "tp-cp-pp-dp",
    },
    "device": {"kind": "cpu", "id": "cpu"},
    "listen_host": "127.0.0.1",
    "memory_limit": None,
    "threads": 1,
}
TOPOLOGY: dict[str, Any] = {
    "type": "topology",
    "job": "j_1",
    "epoch": 1,
    "members": [{"rank": 0, "node": "a", "host": "127.0.0.1", "port": 1}],
    "certificate": {"rank": 0, "certificate_pem": "c", "authority_pem": "a"},
}


def test_an_assignment_is_read() -> None:
    assignment = parse_assignment(ASSIGN)
    assert assignment.rank == 1
    assert assignment.parallel.world_size == 2
    assert assignment.memory_limit is None


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "1"},
        {"rank": True},
        {"job": None},
        {"parallel": {"data_parallel": 0}},
        {"parallel": {"unknown": 1}},
        {"device": {"kind": "abacus", "id": "0"}},
        {"threads": "many"},
    ],
)
def test_a_wrong_assignment_names_the_field(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_assignment({**ASSIGN, **change})


def test_a_topology_is_read_and_checked() -> None:
    assert parse_topology(TOPOLOGY).members[0].hosts == ("127.0.0.1",)
    assert parse_topology(TOPOLOGY).relay == ""
    several = {**TOPOLOGY["members"][0], "hosts": ["192.0.2.1", "2001:db8::1"]}
    order = parse_topology({**TOPOLOGY, "members": [several], "relay": "192.0.2.9:50052"})
    assert (order.members[0].hosts[1:], order.relay) == (("192.0.2.1", "2001:db8::1"), "192.0.2.9:50052")
    for wrong in ({"members": [{**several, "hosts": [1]}]}, {"relay": 5}):
        with pytest.raises(ConfigError, match="should be of type str"):
            parse_topology({**TOPOLOGY, **wrong})
    with pytest.raises(ConfigError, match="members"):
        parse_topology({**TOPOLOGY, "members": "none"})
    with pytest.raises(ConfigError, match="certificate"):
        parse_topology({"members": []})
    with pytest.raises(ConfigError, match="epoch"):
        parse_topology({**TOPOLOGY, "epoch": "1"})


def test_a_topology_of_another_membership_is_refused() -> None:
    """Orders that were on their way when the membership changed, before the one that counts."""
    said = io.StringIO()
    mailbox = Mailbox()
    assignment = parse_assignment({**ASSIGN, "job": "j_1", "epoch": 2})
    for change in ({"epoch": 1}, {"epoch": 3}, {"epoch": 2, "job": "j_2"}, {"epoch": 2}):
        mailbox.deliver({**TOPOLOGY, **change})
    desk = MembershipDesk(assignment, port=1, mailbox=mailbox, emitter=Emitter(said), on_seat=lambda: None)
    desk.start()
    seat = desk.next(-1)
    assert seat is not None
    assert seat.me.epoch == 2
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    warnings = [line["text"] for line in lines if line["type"] == "event"]
    assert warnings[0] == "refused a topology of job j_1 in epoch 1: this worker is of job j_1 in epoch 2"
    assert len(warnings) == 3


@pytest.mark.parametrize("line", ["", "[]", "{", "3", "\x00"])
def test_a_line_that_is_no_object_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="supervisor"):
        parse_line(line)


def test_drain_overtakes_the_queue() -> None:
    mailbox = Mailbox()
    mailbox.deliver({"type": "topology"})
    mailbox.deliver({"type": "drain", "seconds": 1})
    assert mailbox.draining
    mailbox.wait_for_drain()
    assert mailbox.take() == {"type": "topology"}


def test_the_emitter_writes_one_object_a_line() -> None:
    stream = io.StringIO()
    emitter = Emitter(stream)
    emitter.event("info", "two\nlines")
    emitter.failed(FailureCode.ERROR, MemoryError())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0] == {"type": "event", "severity": "info", "text": "two\nlines"}
    assert lines[1] == {"type": "failed", "code": "error", "message": "MemoryError"}


def test_a_loss_that_is_no_number_never_becomes_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Emitter(io.StringIO()).emit("progress", loss=float("nan"))


def test_a_supervisor_that_is_gone_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    Emitter(stream).event("info", "nobody reads this")
