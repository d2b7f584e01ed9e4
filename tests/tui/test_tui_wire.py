"""The local socket's language: good lines become messages, bad ones a WireError, nothing else."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor_tui.wire import Answer, Hello, Unknown, Update, WireError, decode, encode_request

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def test_hello_carries_versions() -> None:
    line = b'{"type":"hello","schema_version":1,"server_version":"0.1.0","node":"atlas-3","pid":12}'
    assert decode(line) == Hello(schema_version=1, server_version="0.1.0", node="atlas-3", pid=12)


@pytest.mark.parametrize(("kind", "full"), [("snapshot", True), ("delta", False)])
def test_updates_say_whether_they_are_whole(kind: str, full: bool) -> None:
    message = decode(json.dumps({"type": kind, "seq": 7, "data": {"node": None}}))
    assert message == Update(full=full, seq=7, data={"node": None})


def test_an_error_answer_has_code_message_and_fix() -> None:
    error = {"code": "bad_params", "message": "no", "fix": "do"}
    message = decode(json.dumps({"type": "response", "id": "3", "ok": False, "error": error}))
    assert message == Answer(id="3", ok=False, code="bad_params", message="no", fix="do")


def test_a_message_of_a_newer_supervisor_is_not_an_error() -> None:
    assert decode(b'{"type":"weather","sun":true}') == Unknown(kind="weather")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"HTTP/1.1 400 Bad Request", "not JSON"),
        (b"[1]", "object"),
        (b"{}", "without a type"),
        (b'{"type":"hello"}', "schema_version"),
        (b'{"type":"hello","schema_version":"one"}', "'one'"),
        (b'{"type":"snapshot","data":[]}', "list"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "nested"),
    ],
)
def test_what_is_not_the_protocol_is_named(line: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode(line)


@given(JSON | st.dictionaries(st.sampled_from(["type", "data", "id", "ok", "error", "schema_version"]), JSON))
def test_any_json_is_a_message_or_a_wire_error(value: object) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(json.dumps(value)), Hello | Update | Answer | Unknown)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(line: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(line), Hello | Update | Answer | Unknown)


def test_a_request_is_one_line() -> None:
    line = encode_request("9", "pause", {"seconds": 3600})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"type": "request", "id": "9", "method": "pause", "params": {"seconds": 3600}}
