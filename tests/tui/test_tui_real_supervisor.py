"""The dashboard and the commands against the real supervisor and hub, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from distensor_tui.app import Dashboard
from distensor_tui.cli import main
from distensor_tui.client import Client
from distensor_tui.clock import system_monotonic, system_now
from distensor_tui.model import HubState, NodeState
from distensor_tui.scene import Link

pytest.importorskip("distensor_server")
pytestmark = pytest.mark.timeout(180)
PATIENCE = 60.0


class Process:
    """A process of the product that announces itself in JSON lines."""

    def __init__(self, words: list[str], log: Path, **environ: str) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **environ},
            )
        self._log = log

    def event(self, name: str) -> dict[str, Any]:
        """The first announcement of this kind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            value: dict[str, Any] = json.loads(line)
            if value["event"] == name:
                return value
        raise AssertionError(f"{name} never came:\n{self._log.read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Node:
    """A hub and one supervisor that is connected to it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s.sock"
        self._folder = folder
        hub_words = ["distensor", "hub", "--state", str(folder / "hub"), "--listen", "127.0.0.1:0"]
        self.hub = Process([*hub_words, "--node-tokens", "1", "--json"], folder / "hub.log")
        self._token = self.hub.event("ready")["node_tokens"][0]
        self.supervisor = self.start_supervisor()
        self.supervisor.event("connected")

    def start_supervisor(self) -> Process:
        words = ["distensor_server", "run", "--state", str(self._folder / "node"), "--name", "atlas-3"]
        words += ["--socket", str(self.socket), "--cpu-workers", "2", "--json"]
        self.supervisor = Process(words, self._folder / "node.log", DISTENSOR_JOIN_TOKEN=self._token)
        return self.supervisor

    def close(self) -> None:
        self.supervisor.close()
        self.hub.close()


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    started = Node(tmp_path_factory.mktemp("n"))
    yield started
    started.close()


def asked(node: Node, verb: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([verb, "--json", "--socket", str(node.socket)]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return value


def test_every_verb_is_answered(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    status = asked(node, "status", capsys)
    assert (status["v"], status["ok"], status["node"]["name"]) == (1, True, "atlas-3")
    assert status["hub"]["state"] == "connected"
    assert [gate["gate"] for gate in asked(node, "why", capsys)["node"]["why"]]
    cpu = next(device for device in asked(node, "devices", capsys)["devices"] if device["kind"] == "cpu")
    assert cpu["slots"] == 2
    assert asked(node, "jobs", capsys)["jobs"] == []
    assert asked(node, "earnings", capsys)["earnings"]["confirmed_micro"] == 0
    assert main(["pause", "--for", "1h", "--socket", str(node.socket)]) == 0
    assert asked(node, "status", capsys)["node"]["state"] == "PAUSED"
    assert main(["resume", "--socket", str(node.socket)]) == 0
    assert asked(node, "status", capsys)["node"]["state"] == "IDLE"
    assert main(["drain", "--socket", str(node.socket)]) == 0
    assert asked(node, "status", capsys)["node"]["state"] == "PAUSED"


Until = Callable[[Callable[[], bool]], Any]


@asynccontextmanager
async def dashboard(node: Node) -> AsyncIterator[tuple[Dashboard, Any, Until]]:
    app = Dashboard(name=str(node.socket), now=system_now, monotonic=system_monotonic)
    app.follow(Client(node.socket, app))

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - conditions of other processes
                await asyncio.sleep(0.05)

    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: app.view.has_data)
        yield app, pilot, until


@pytest.mark.asyncio
async def test_the_dashboard_follows_and_steers_it(node: Node) -> None:
    async with dashboard(node) as (app, pilot, until):
        await until(lambda: "IDLE" in app.screen_text())
        assert app.view.snapshot.problems == ()
        assert "No job. This node is ready" in app.screen_text()
        assert "All well" in app.screen_text()
        await pilot.press("p", "1")
        await until(lambda: "Paused for one hour." in app.screen_text())
        await until(lambda: "PAUSED" in app.screen_text())
        await pilot.press("r")
        await until(lambda: "IDLE" in app.screen_text())


@pytest.mark.asyncio
async def test_a_dead_hub_is_shown(node: Node) -> None:
    async with dashboard(node) as (app, _pilot, until):
        node.hub.kill()
        hub = lambda: app.view.snapshot.hub  # noqa: E731
        await until(lambda: (found := hub()) is not None and found.state is HubState.OFFLINE)
        await until(lambda: "hub ✖ offline" in app.screen_text())
        state = app.view.snapshot.node
        assert state is not None
        assert state.state is NodeState.OFFLINE
        await until(lambda: "unconfirmed since" in app.screen_text())


@pytest.mark.asyncio
async def test_a_killed_supervisor_leaves_a_grey_screen_until_it_is_back(node: Node) -> None:
    async with dashboard(node) as (app, _pilot, until):
        node.supervisor.kill()
        await until(lambda: app.view.feed.link is Link.LOST)
        await until(lambda: "The supervisor is not running; as of" in app.screen_text())
        assert "atlas-3" in app.screen_text()
        node.supervisor.close()
        node.start_supervisor()
        await until(lambda: app.view.feed.link is Link.LIVE)
        await until(lambda: "as of" not in app.screen_text())
