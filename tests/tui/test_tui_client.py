"""The connection to a supervisor: following, asking, losing and finding it again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake

from distensor_tui import client as client_module
from distensor_tui.absence import Absence, Reason, from_os_error, not_running, other_version
from distensor_tui.client import GONE, Client
from distensor_tui.wire import Hello, Update


class Heard:
    """A sink that keeps everything, and can be waited on."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.updates: list[Update] = []
        self.losses: list[Absence] = []
        self.delays: list[float] = []
        self._news = asyncio.Event()

    def on_hello(self, hello: Hello) -> None:
        self.hellos.append(hello)
        self._news.set()

    def on_update(self, update: Update) -> None:
        self.updates.append(update)
        self._news.set()

    def on_lost(self, why: Absence, retry_in: float) -> None:
        self.losses.append(why)
        self.delays.append(retry_in)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()


async def at_once(seconds: float) -> None:
    """The waits between two tries, without the waiting."""
    await asyncio.sleep(0.001)


@asynccontextmanager
async def following(path: Path, heard: Heard) -> AsyncIterator[Client]:
    client = Client(path, heard, sleep=at_once)
    task = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def remove(path: Path) -> None:
    path.unlink()


@contextmanager
def powerless() -> Iterator[None]:
    """Root may open every socket: be somebody else for a while."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def forbid(path: Path) -> None:
    path.chmod(0)


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


@pytest.mark.asyncio
async def test_hello_then_snapshot_then_deltas(path: Path) -> None:
    heard = Heard()
    async with fake.serving(path) as server, following(path, heard):
        await heard.until(lambda: bool(heard.updates))
        server.push(jobs=[fake.job(step=18205)])
        await heard.until(lambda: len(heard.updates) == 2)
    assert heard.hellos[0].node == "atlas-3"
    assert [update.full for update in heard.updates] == [True, False]
    assert heard.updates[1].data["jobs"][0]["step"] == 18205


@pytest.mark.asyncio
async def test_requests_are_answered_by_id(path: Path) -> None:
    heard = Heard()
    async with fake.serving(path) as server, following(path, heard) as client:
        await heard.until(lambda: bool(heard.updates))
        server.respond = lambda request: {"ok": True, "result": {"echo": request["method"]}}
        answers = await asyncio.gather(client.ask("pause", {"seconds": 60}), client.ask("resume"))
    assert [answer.result["echo"] for answer in answers] == ["pause", "resume"]
    assert server.requests[0]["params"] == {"seconds": 60}


@pytest.mark.asyncio
async def test_a_refusal_keeps_its_reason(path: Path) -> None:
    heard = Heard()
    async with fake.serving(path) as server, following(path, heard) as client:
        await heard.until(lambda: bool(heard.updates))
        server.respond = lambda request: {"ok": False, "error": {"code": "c", "message": "m", "fix": "f"}}
        answer = await client.ask("drain")
    assert (answer.ok, answer.code, answer.message, answer.fix) == (False, "c", "m", "f")


@pytest.mark.asyncio
async def test_asking_nobody_is_answered_at_once(path: Path) -> None:
    assert await Client(path, Heard()).ask("pause") is GONE


@pytest.mark.asyncio
async def test_a_request_in_flight_ends_with_the_supervisor(path: Path) -> None:
    heard = Heard()
    async with fake.serving(path) as server, following(path, heard) as client:
        await heard.until(lambda: bool(heard.updates))
        asked = asyncio.create_task(client.ask("pause"))
        server.respond = lambda request: {"type": "unheard"}
        await server.stop()
        assert not (await asked).ok


@pytest.mark.asyncio
async def test_it_finds_a_supervisor_that_comes_back(path: Path) -> None:
    heard = Heard()
    async with following(path, heard):
        await heard.until(lambda: len(heard.losses) >= 3)
        assert heard.losses[-1].reason is Reason.NOT_RUNNING
        async with fake.serving(path):
            await heard.until(lambda: bool(heard.updates))
        await heard.until(lambda: "Nobody listens" in heard.losses[-1].detail)
        remove(path)
        async with fake.serving(path):
            await heard.until(lambda: len(heard.hellos) == 2)


@pytest.mark.asyncio
async def test_waits_grow_to_a_limit_and_start_again_after_success(path: Path) -> None:
    heard = Heard()
    async with following(path, heard):
        await heard.until(lambda: len(heard.delays) >= 8)
        assert heard.delays[:7] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
        async with fake.serving(path):
            await heard.until(lambda: bool(heard.updates))
        before = len(heard.delays)
        await heard.until(lambda: len(heard.delays) > before)
        assert heard.delays[before] == client_module.FIRST_RETRY_S


@pytest.mark.asyncio
async def test_another_schema_is_another_version(path: Path) -> None:
    heard = Heard()
    async with (
        fake.serving(path, hello={**fake.HELLO, "schema_version": 2, "server_version": "3.0.0"}),
        following(path, heard),
    ):
        await heard.until(lambda: bool(heard.losses))
    assert heard.losses[0].reason is Reason.OTHER_VERSION
    assert "3.0.0" in heard.losses[0].detail
    assert "distensor-tui" in heard.losses[0].fix[0]
    assert heard.updates == []


@pytest.mark.parametrize(
    ("sends", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", Reason.NOT_A_SUPERVISOR),
        (b"HTTP/1.1 400", Reason.NOT_A_SUPERVISOR),
        (b'{"type":"snapshot","data":{}}\n', Reason.NOT_A_SUPERVISOR),
        (b"", Reason.NOT_RUNNING),
    ],
)
@pytest.mark.asyncio
async def test_what_is_not_a_supervisor_is_named(path: Path, sends: bytes, reason: Reason) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sends)
        writer.close()

    heard = Heard()
    server = await asyncio.start_unix_server(answer, path)
    async with server, following(path, heard):
        await heard.until(lambda: bool(heard.losses))
    assert heard.losses[0].reason is reason


@pytest.mark.asyncio
async def test_a_supervisor_that_falls_silent_is_asked_and_then_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PING_EVERY_S", 0.05)
    monkeypatch.setattr(client_module, "ANSWER_WITHIN_S", 0.05)
    thrice = asyncio.Event()
    heard = Heard()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if len(server.requests) == 3:
            thrice.set()
        return {"ok": True}

    async with fake.serving(path) as server, following(path, heard):
        server.respond = answer
        await heard.until(lambda: bool(heard.updates))
        async with asyncio.timeout(10):
            await thrice.wait()
        assert heard.losses == []
        server.respond = lambda request: {"type": "mute"}
        server._send = lambda writer, message: None  # type: ignore[method-assign]
        await heard.until(lambda: bool(heard.losses))
    assert heard.losses[0].reason is Reason.SILENT


@pytest.mark.asyncio
async def test_a_path_over_the_limit_says_how_long_it_is(tmp_path: Path) -> None:
    heard = Heard()
    async with following(tmp_path / ("x" * 120), heard):
        await heard.until(lambda: bool(heard.losses))
    assert heard.losses[0].reason is Reason.PATH_TOO_LONG


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "x"), Reason.NOT_RUNNING),
        (ConnectionRefusedError(111, "x"), Reason.NOT_RUNNING),
        (PermissionError(13, "x"), Reason.NOT_PERMITTED),
        (OSError(88, "not a socket"), Reason.NOT_A_SUPERVISOR),
    ],
)
def test_each_error_of_connect_has_its_text(error: OSError, reason: Reason, path: Path) -> None:
    assert from_os_error(error, path).reason is reason


def test_a_file_in_the_place_of_the_socket_is_not_a_supervisor(path: Path) -> None:
    path.write_text("hello")
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError) as caught:
        probe.connect(str(path))
    assert from_os_error(caught.value, path).reason is Reason.NOT_A_SUPERVISOR


@pytest.mark.asyncio
async def test_a_socket_of_another_user_is_not_permitted(path: Path) -> None:
    heard = Heard()
    async with fake.serving(path):
        forbid(path)
        with powerless():
            async with following(path, heard):
                await heard.until(lambda: bool(heard.losses))
    assert heard.losses[0].reason is Reason.NOT_PERMITTED


def test_texts_differ_and_each_has_a_fix(path: Path) -> None:
    older = other_version(Hello(schema_version=0, server_version="0.0.9", node=""))
    whys = [not_running(path), from_os_error(PermissionError(13, "x"), path), older]
    assert len({why.title for why in whys}) == 3
    assert all(why.fix for why in whys)
    assert "distensor-server" in older.fix[0]
