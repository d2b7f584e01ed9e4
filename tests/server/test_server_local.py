"""The local socket."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from server_fakes import AsyncClient, eventually

from distensor.core.errors import SessionError, StoreError
from distensor_server.localserver import MAX_REQUEST, LocalServer, RequestError

HELLO = {"server_version": "0.1.0", "node": "atlas-3", "pid": 5}


def refuse(_params: Mapping[str, Any]) -> Mapping[str, Any]:
    raise RequestError(code="no", message="not today", fix="come tomorrow")


class Served:
    """A server whose sections a test sets."""

    def __init__(self, path: Path) -> None:
        self.sections: dict[str, Any] = {"node": {"state": "IDLE"}, "events": []}
        self.server = LocalServer(
            path,
            hello=HELLO,
            sections=lambda: dict(self.sections),
            methods={"echo": lambda params: {"params": dict(params)}, "refuse": refuse},
        )


@pytest_asyncio.fixture
async def served(short_dir: Path) -> AsyncIterator[Served]:
    made = Served(short_dir / "s.sock")
    await made.server.start()
    yield made
    await made.server.close()


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[AsyncClient]:
    connected = await AsyncClient.connect(served.server.path)
    yield connected
    await connected.close()


@pytest.mark.asyncio
async def test_hello_then_snapshot_then_only_what_changed(served: Served, client: AsyncClient) -> None:
    assert await client.read() == {"type": "hello", "schema_version": 1, **HELLO}
    assert await client.read() == {"type": "snapshot", "seq": 1, "data": {"node": {"state": "IDLE"}, "events": []}}
    served.server.publish()
    served.sections["events"] = ["x"]
    served.server.publish()
    assert await client.read() == {"type": "delta", "seq": 2, "data": {"events": ["x"]}}


@pytest.mark.asyncio
async def test_requests_and_answers(client: AsyncClient) -> None:
    ok = {"type": "response", "id": "7", "ok": True}
    assert await client.request("ping") == {**ok, "result": {}}
    assert await client.request("echo", a=1) == {**ok, "result": {"params": {"a": 1}}}
    snapshot = await client.request("snapshot")
    assert snapshot["result"]["data"]["node"] == {"state": "IDLE"}
    assert await client.request("refuse") == {
        "type": "response",
        "id": "7",
        "ok": False,
        "error": {"code": "no", "message": "not today", "fix": "come tomorrow"},
    }
    unknown = await client.request("fly")
    assert unknown["error"] == {
        "code": "unknown_method",
        "message": "no method 'fly'",
        "fix": "use one of echo, ping, refuse, snapshot",
    }


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b"[]\n",
        b'{"type": "request"}\n',
        b'{"type": "request", "id": 5, "method": "ping"}\n',
        b'{"type": "request", "id": "5", "method": "ping", "params": []}\n',
        b'{"type": "response", "id": "5", "method": "ping"}\n',
        b"[" * 5000 + b"\n",
        b"\xff\xfe\x00\n",
    ],
)
@pytest.mark.asyncio
async def test_a_bad_request_is_answered_and_the_client_stays(client: AsyncClient, line: bytes) -> None:
    answer = await client.ask_bytes(line)
    assert (answer["ok"], answer["error"]["code"]) == (False, "bad_request")
    assert (await client.request("ping"))["ok"]


@pytest.mark.asyncio
async def test_several_requests_in_one_packet_and_one_in_many(client: AsyncClient) -> None:
    requests = [json.dumps({"type": "request", "id": str(n), "method": "ping"}).encode() + b"\n" for n in range(3)]
    answer = await client.ask_bytes(b"\n".join(requests))
    assert answer["id"] == "0"
    assert [(await client.read() or {})["id"] for _ in range(2)] == ["1", "2"]
    for byte in requests[2][:-1]:
        client.writer.write(bytes([byte]))
    assert (await client.ask_bytes(b"\n"))["id"] == "2"


@pytest.mark.asyncio
async def test_a_line_that_is_too_long_ends_its_client_and_no_other(served: Served, client: AsyncClient) -> None:
    other = await AsyncClient.connect(served.server.path)
    answer = await client.ask_bytes(b"x" * (MAX_REQUEST + 1))
    assert answer["error"]["code"] == "too_long"
    assert await client.read() is None
    assert (await other.request("ping"))["ok"]
    await other.close()


@pytest.mark.asyncio
async def test_a_client_that_does_not_read_is_not_fed_and_later_gets_a_snapshot(served: Served) -> None:
    slow = await AsyncClient.connect(served.server.path)
    await slow.read()
    await slow.read()
    slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
    for number in range(200):
        served.sections["events"] = [f"{number}" + "x" * 100_000]
        served.server.publish()
        await asyncio.sleep(0)
    (inside,) = served.server._clients
    assert inside._transport is not None
    assert inside._transport.get_write_buffer_size() < 4 << 20, "news for one that does not read is not kept"
    slow.reader._transport.resume_reading()  # type: ignore[attr-defined]
    served.sections["events"] = ["last"]

    async def until_snapshot() -> dict[str, Any]:
        while True:
            served.server.publish()
            message = await slow.read()
            assert message is not None
            if message["type"] == "snapshot":
                return message

    message = await asyncio.wait_for(until_snapshot(), 10)
    assert message["data"]["events"] == ["last"]
    await slow.close()


@pytest.mark.asyncio
async def test_nothing_is_computed_for_nobody(served: Served) -> None:
    assert not served.server.watched
    client = await AsyncClient.connect(served.server.path)
    await client.read()
    assert served.server.watched
    await client.close()
    await eventually(lambda: not served.server.watched, "the client is gone")


@pytest.mark.asyncio
async def test_only_the_owner_can_connect(served: Served) -> None:
    assert stat.S_IMODE(served.server.path.stat().st_mode) == 0o600


@pytest.mark.asyncio
async def test_a_new_directory_is_private(short_dir: Path) -> None:
    made = Served(short_dir / "new" / "s.sock")
    await made.server.start()
    assert stat.S_IMODE((short_dir / "new").stat().st_mode) == 0o700
    await made.server.close()
    assert not made.server.path.exists()


@pytest.mark.asyncio
async def test_a_socket_file_that_nobody_answers_at_is_replaced(short_dir: Path) -> None:
    path = short_dir / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    made = Served(path)
    await made.server.start()
    client = await AsyncClient.connect(path)
    assert (await client.read() or {})["type"] == "hello"
    await client.close()
    await made.server.close()


@pytest.mark.asyncio
async def test_a_socket_that_answers_is_left_alone(served: Served, client: AsyncClient) -> None:
    second = Served(served.server.path)
    with pytest.raises(SessionError, match="another supervisor answers"):
        await second.server.start()
    await second.server.close()
    assert (await client.request("ping"))["ok"]
    assert served.server.path.exists()


@pytest.mark.asyncio
async def test_a_socket_file_that_became_somebody_elses_is_not_removed(short_dir: Path) -> None:
    first, second = Served(short_dir / "s.sock"), Served(short_dir / "s.sock")
    await first.server.start()
    (short_dir / "s.sock").unlink()
    await second.server.start()
    await first.server.close()
    assert (short_dir / "s.sock").exists()
    await second.server.close()


@pytest.mark.asyncio
async def test_paths_that_cannot_be_are_named(short_dir: Path) -> None:
    long = short_dir / ("x" * 120)
    with pytest.raises(StoreError, match=r"has \d+ bytes .* --socket"):
        await Served(long).server.start()
    (short_dir / "file").write_text("precious")
    with pytest.raises(StoreError, match="is no socket"):
        await Served(short_dir / "file").server.start()
    with pytest.raises(StoreError, match=r"cannot look at .*file/s\.sock"):
        await Served(short_dir / "file" / "s.sock").server.start()
    assert (short_dir / "file").read_text() == "precious"
