"""What is shown while the supervisor is away: the picture that it left behind, and nothing that is not one."""

from __future__ import annotations

import json
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake
from test_tui_app import until

from distensor_tui import lastseen
from distensor_tui.app import Dashboard
from distensor_tui.client import Client
from distensor_tui.clock import system_monotonic


def left(at: float = fake.NOW - 3600, **changes: Any) -> str:
    return json.dumps({"v": 1, "schema_version": 1, "at": at, "data": fake.snapshot(), **changes})


@pytest.mark.parametrize("folder", ["", "server"])
def test_it_lies_beside_the_socket_or_one_folder_down(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "snapshot.json").write_text(left())
    found = lastseen.load(lastseen.places(tmp_path / "supervisor.sock"))
    assert found is not None
    assert found.at == fake.NOW - 3600
    assert found.snapshot.node is not None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", left(schema_version=2), left(at="x"), left(data=[]), left(data={}), "[" * 100_000],
    ids=range(9),
)
def test_what_is_no_picture_is_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "snapshot.json").write_text(text)
    assert lastseen.load((tmp_path / "snapshot.json",)) is None


def test_a_file_that_grew_without_bound_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "snapshot.json").open("wb") as file:
        file.truncate(lastseen.LARGEST + 1)
    assert lastseen.load((tmp_path / "snapshot.json", tmp_path / "missing")) is None


@pytest.mark.asyncio
async def test_without_a_supervisor_the_last_picture_is_shown_grey_with_its_age(tmp_path: Path) -> None:
    (tmp_path / "snapshot.json").write_text(left())
    path = tmp_path / "s.sock"
    app = Dashboard(
        name="x",
        now=lambda: fake.NOW,
        monotonic=system_monotonic,
        zone=UTC,
        last_seen=lambda: lastseen.load(lastseen.places(path)),
    )
    app.follow(Client(path, app))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "as of 13:13, 1 h 00 min ago" in app.screen_text())
        assert "[atlas-3:1]" in app.screen_text()
        assert "The supervisor is not running" in app.screen_text()
        await pilot.press("n")
        assert "distensor-server run" in app.screen_text()
        async with fake.serving(path):
            await until(pilot, lambda: "as of" not in app.screen_text())
