"""Put the dashboard together: source, clock, glyphs and terminal; or write one screen as SVG."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distensor_tui import glyphs, lastseen
from distensor_tui.app import Dashboard
from distensor_tui.client import Client
from distensor_tui.clock import Now, system_monotonic, system_now
from distensor_tui.paths import SOCKET_NAME, socket_path
from distensor_tui.scene import Screen

if TYPE_CHECKING:
    from distensor_tui.recording import Moment

UNAVAILABLE, CANNOT_CREATE = 69, 73
FIRST_DATA_WITHIN_S = 10.0


def dashboard(options: argparse.Namespace, path: Path, moments: list[Moment] | None) -> int:
    """Show the supervisor, or the moments of a recording, until it is quit; the exit code."""
    app = _app(options, path, moments)
    if options.screenshot:
        return _screenshot(app, options)
    from distensor_tui.terminal import run

    return run(app, mouse=not options.no_mouse)


def _app(options: argparse.Namespace, path: Path, moments: list[Moment] | None) -> Dashboard:
    from distensor_tui.terminal import SafeDriver

    clock = _Clock()
    app = Dashboard(
        name=options.replay or ("the recorded demo" if moments else str(path)),
        now=clock.now,
        monotonic=system_monotonic,
        glyphs=glyphs.ASCII if options.ascii else glyphs.for_terminal(os.environ),
        screen=Screen(options.screen),
        colours="NO_COLOR" not in os.environ,
        driver_class=SafeDriver,
        last_seen=lambda: lastseen.load(lastseen_places(path)),
    )
    if moments:
        from distensor_tui.recording import Player

        player = Player(moments, app, monotonic=system_monotonic, ended=app.on_replay_end)
        clock.now_of = player.now
        app.replay(player)
    else:
        app.follow(Client(path, app))
    return app


def lastseen_places(path: Path) -> tuple[Path, ...]:
    """A socket in the runtime directory has its state elsewhere: where it is when nothing else is asked for."""
    if path != socket_path(None, os.environ):
        return lastseen.places(path)
    import platformdirs  # costs 15 ms, and only who finds no supervisor pays

    return (*lastseen.places(path), *lastseen.places(Path(platformdirs.user_state_dir("distensor")) / SOCKET_NAME))


class _Clock:
    """The machine's time, or that of a recording once there is a player."""

    def __init__(self) -> None:
        self.now_of: Now = system_now

    def now(self) -> float:
        return self.now_of()


def _screenshot(app: Dashboard, options: argparse.Namespace) -> int:
    """Run without a terminal, watch the data for a while, write the screen."""
    asyncio.run(_watch(app, options.size, options.wait))
    if not app.view.has_data:
        return _no_screenshot(app)
    from distensor_tui.svg import picture

    node = app.view.feed.hello.node if app.view.feed.hello else app.title
    return _write(Path(options.screenshot), picture(app.shown, f"distensor - {node}"))


async def _watch(app: Dashboard, size: tuple[int, int], seconds: float) -> None:
    async with app.run_test(size=size) as pilot:
        deadline = system_monotonic() + FIRST_DATA_WITHIN_S
        while not app.view.has_data and app.view.feed.absence is None and system_monotonic() < deadline:
            await pilot.pause(0.05)
        if app.view.has_data:
            await pilot.pause(seconds)


def _write(path: Path, svg: str) -> int:
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"distensor: cannot write {path}: {error.strerror}\n")
        return CANNOT_CREATE
    return 0


def _no_screenshot(app: Dashboard) -> int:
    from distensor_tui.plain import absent

    why = app.view.feed.absence
    sys.stderr.write(f"distensor: no screenshot: {absent(why) if why else 'no data came'}\n")
    return why.exit_code if why else UNAVAILABLE
