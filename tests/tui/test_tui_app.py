"""The dashboard as an app: what it shows of a live socket, what its keys send, how it takes bad news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake
from textual.pilot import Pilot

from distensor_tui.app import Canvas, Dashboard
from distensor_tui.client import Client
from distensor_tui.clock import system_monotonic
from distensor_tui.scene import Link, Screen

pytestmark = pytest.mark.asyncio


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


async def until(pilot: Pilot[int], condition: Callable[[], bool]) -> None:
    """Let the app work until something is so."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110 - many different conditions of a whole app
            await asyncio.sleep(0.01)


@asynccontextmanager
async def dashboard(path: Path, size: tuple[int, int] = (120, 40)) -> AsyncIterator[tuple[Dashboard, Pilot[int]]]:
    app = Dashboard(name=str(path), now=lambda: fake.NOW, monotonic=system_monotonic, zone=UTC)
    app.follow(Client(path, app))
    async with app.run_test(size=size) as pilot:
        yield app, pilot


@asynccontextmanager
async def live(
    path: Path, data: dict[str, Any] | None = None, size: tuple[int, int] = (120, 40)
) -> AsyncIterator[tuple[Dashboard, Pilot[int], fake.FakeSupervisor]]:
    async with fake.serving(path, data) as server, dashboard(path, size) as (app, pilot):
        await until(pilot, lambda: "atlas-3" in app.screen_text() or "n[/]" in app.screen_text())
        yield app, pilot, server


async def test_it_shows_a_live_job(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        server.push(jobs=[fake.job(step=18299, loss=1.2345)])
        await until(pilot, lambda: "18,299" in app.screen_text())
        assert "1.2345" in app.screen_text()
        assert "[atlas-3:1]" in app.screen_text()


async def test_what_textual_paints_is_what_the_frame_says(path: Path) -> None:
    async with live(path, fake.hostile()) as (app, _pilot, _server):
        canvas = app.query_one(Canvas)
        painted = ["".join(segment.text for segment in strip) for strip in canvas.render_lines(canvas.region)]
        assert "\n".join(painted) == app.screen_text()
        for literal in ("[00] x", "[red]", "[/]", "[b"):
            assert literal in "\n".join(painted), literal


@pytest.mark.parametrize("digit", "234567")
async def test_hostile_text_on_every_screen_and_in_every_box(path: Path, digit: str) -> None:
    async with live(path, fake.hostile()) as (app, pilot, _server):
        await pilot.press(digit, "enter")
        await pilot.pause()
        assert any(literal in app.screen_text() for literal in ("[00] x", "[red]", "[/]", "[b"))
        for box in ("p", "d", "w", "question_mark"):
            await pilot.press("escape", digit, box)
        assert app.is_running


async def test_a_hostile_answer_is_shown_literally(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        server.respond = lambda request: {"ok": False, "error": {"code": "[b", "message": "[/] [red]", "fix": "[00] x"}}
        await pilot.press("r")
        await until(pilot, lambda: "resume failed: [/] [red] ([00] x)" in app.screen_text())


async def test_pause_asks_first_and_sends_the_choice(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        await pilot.press("p")
        assert "Pause this node?" in app.screen_text()
        assert server.requests == []
        await pilot.press("1")
        await until(pilot, lambda: "Paused for one hour." in app.screen_text())
        assert [(r["method"], r["params"]) for r in server.requests] == [("pause", {"seconds": 3600})]


async def test_escape_sends_nothing(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        await pilot.press("p", "escape", "d", "escape")
        await pilot.pause()
        assert server.requests == []
        assert "Pause this node?" not in app.screen_text()


@pytest.mark.parametrize(
    ("keys", "method", "says"),
    [(("d", "y"), "drain", "Draining"), (("r",), "resume", "Resumed."), (("p", "3"), "pause", "until")],
)
async def test_orders(path: Path, keys: tuple[str, ...], method: str, says: str) -> None:
    async with live(path) as (app, pilot, server):
        await pilot.press(*keys)
        await until(pilot, lambda: bool(server.requests))
        await until(pilot, lambda: says in app.screen_text())
        assert [(r["method"], r["params"]) for r in server.requests] == [(method, {})]


async def test_a_lost_supervisor_leaves_the_last_screen_and_comes_back(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        await server.stop()
        await until(pilot, lambda: "as of 14:13" in app.screen_text())
        assert app.view.feed.link is Link.LOST
        assert "[atlas-3:1]" in app.screen_text()
        path.unlink()  # noqa: ASYNC240 - a temporary folder
        await server.start()
        await until(pilot, lambda: app.view.feed.link is Link.LIVE)
        await until(pilot, lambda: "as of" not in app.screen_text())


async def test_orders_without_a_supervisor_say_so(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        await server.stop()
        await until(pilot, lambda: app.view.feed.link is Link.LOST)
        await pilot.press("r")
        await until(pilot, lambda: "resume failed" in app.screen_text())
        assert "distensor-server run" in app.screen_text()


async def test_without_any_supervisor_it_says_how_to_start_one(path: Path) -> None:
    async with dashboard(path, (80, 24)) as (app, pilot):
        await until(pilot, lambda: "The supervisor is not running" in app.screen_text())
        assert "distensor-server run" in app.screen_text()


async def test_resizing_down_to_one_cell_and_back(path: Path) -> None:
    async with live(path, size=(200, 60)) as (app, pilot, _server):
        for width, height in [(80, 24), (40, 10), (10, 3), (1, 1), (3, 1), (60, 15), (200, 60)]:
            await pilot.resize_terminal(width, height)
            await until(pilot, lambda size=(width, height): (app.size.width, app.size.height) == size)
            await until(pilot, lambda height=height: len(app.shown) == height)
        await until(pilot, lambda: "[atlas-3:1]" in app.screen_text())


async def test_a_tiny_screen_still_says_the_state(path: Path) -> None:
    async with live(path) as (app, pilot, _server):
        await pilot.resize_terminal(40, 10)
        await until(pilot, lambda: app.screen_text().startswith("● EARNING  too small"))


async def test_a_click_is_a_key(path: Path) -> None:
    async with live(path) as (app, pilot, _server):
        footer = app.screen_text().splitlines()[-1]
        await pilot.click(offset=(footer.index("Jobs"), 39))
        await until(pilot, lambda: "Workers on this node" in app.screen_text())


async def test_unchanged_news_repaints_nothing(path: Path) -> None:
    async with live(path) as (app, pilot, server):
        await until(pilot, lambda: "18,204" in app.screen_text())
        before = [id(row) for row in app.shown]
        updates = app.view.feed.last_at
        server.push(devices=server.data["devices"])
        await pilot.pause(0.7)
        assert [id(row) for row in app.shown] == before
        assert app.view.feed.last_at == updates


async def test_details_are_copied(path: Path) -> None:
    async with live(path) as (app, pilot, _server):
        await pilot.press("6", "y")
        await until(pilot, lambda: "Copied." in app.screen_text())
        assert "name: NVIDIA RTX 4090" in app.clipboard


async def test_q_ends_with_0(path: Path) -> None:
    async with live(path) as (app, pilot, _server):
        await pilot.press("q")
        await pilot.pause()
    assert app.return_value == 0


async def test_it_opens_on_the_wanted_screen(path: Path) -> None:
    app = Dashboard(name="x", now=lambda: fake.NOW, monotonic=system_monotonic, zone=UTC, screen=Screen.LOG)
    async with fake.serving(path):
        app.follow(Client(path, app))
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "checkpoint of step" in app.screen_text())
            assert "newest first" in app.screen_text()
            assert app._ui.dialog is None


async def test_the_first_data_is_painted_at_once(path: Path) -> None:
    """Not after the pause that later updates share."""
    async with fake.serving(path), dashboard(path) as (app, pilot):
        await until(pilot, lambda: app.view.has_data)
        assert "EARNING" in app.screen_text()
        assert "Connecting" not in app.screen_text()


async def test_a_supervisor_that_is_slow_to_greet_is_waited_for_visibly(path: Path) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_unix_server(say_nothing, path), asyncio.timeout(30):
        async with dashboard(path) as (app, pilot):
            await until(pilot, lambda: "Connecting to" in app.screen_text())
        await ended.wait()
