"""A machine without a key: what it says, and the way from a pasted key to a joined hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake
from test_tui_app import live, until
from test_tui_screens import SIZES, compare, idle, on, text
from textual.events import Paste

from distensor_tui.onboarding import complaint
from distensor_tui.scene import Screen

KEY = "dtj_geheim-" + "x" * 40


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


def auth(state: str = "missing", **changes: Any) -> dict[str, Any]:
    empty = {"source": None, "where": None, "key": None, "hub": None, "problem": None, "fix": None}
    return {"state": state, **empty, **changes}


def without_key() -> dict[str, Any]:
    gate = fake.gate("key", is_open=False, reading="no key yet", limit="a key")
    return fake.snapshot(node=fake.node("WAITING", why=[gate]), jobs=[], workers=[], events=[], auth=auth())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_without_a_key_home_says_in_four_lines_what_to_do(size: tuple[int, int]) -> None:
    shown = text(idle(node=without_key()["node"], auth=auth()), size)
    compare(f"home-no-key-{size[0]}x{size[1]}", shown)
    for fact in ("no key yet", "Get a key from", "Press a here", "joins the hub", "Leave the supervisor running"):
        assert fact in shown, fact


def test_without_a_key_nobody_has_refused_anything() -> None:
    error = {"code": "no_key", "message": "this machine has no key yet", "fix": "distensor auth login"}
    node = without_key()["node"]
    shown = text(idle(node=node, auth=auth(), hub=fake.hub("no key", error=error)), (120, 40))
    assert "no key" in shown.splitlines()[0]
    assert "Waiting: key: no key yet" in shown
    assert "refused" not in shown
    assert "rejected" not in shown


def test_a_refused_key_is_the_first_notice() -> None:
    view = idle(auth=auth("rejected", problem="the token is unknown"))
    assert "The hub refuses this machine's key: the token is unknown; press a to give another one" in text(
        view, (120, 40)
    )


def test_jobs_without_a_key_say_what_to_do() -> None:
    shown = text(idle(auth=auth()), (120, 40), on(Screen.JOBS))
    assert "This machine has no key yet: press 1, then a." in shown


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "Paste the key here."),
        ("hello", "A key begins with dtj_; this text does not."),
        ("dtj_a b", "A key has no blanks or line breaks in it; this text has."),
        ("dtj_abc", "This key has only 7 characters: a part of it is missing."),
        (KEY, ""),
    ],
)
def test_a_wrong_key_is_named_without_being_repeated(key: str, says: str) -> None:
    assert complaint(key) == says


class Hub:
    """A supervisor's answers to auth_test and auth_login."""

    def __init__(self, *, refuse: str = "") -> None:
        self.refuse = refuse

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.refuse:
            return {"ok": False, "error": {"code": "key_refused", "message": self.refuse, "fix": "ask the operator"}}
        if request["method"] == "auth_test":
            return {"ok": True, "result": {"hub": "hub.example.net:50051", "fingerprint": "ab" * 32}}
        return {"ok": True, "result": {"where": "the keyring", "source": "keyring", "key": "dtj_...wxyz"}}


@pytest.mark.asyncio
async def test_from_a_pasted_key_to_a_joined_hub(path: Path) -> None:
    async with live(path, without_key()) as (app, pilot, server):
        server.respond = Hub()
        await pilot.press("enter")
        app.post_message(Paste(KEY + "\n"))
        await until(pilot, lambda: "***" in app.screen_text())
        assert "geheim" not in app.screen_text() + repr(app._scene())
        await pilot.press("enter")
        await until(pilot, lambda: "The hub hub.example.net:50051 answers" in app.screen_text())
        assert "geheim" not in app.screen_text() + repr(app._scene())
        await pilot.press("y")
        await until(pilot, lambda: "Kept in the keyring." in app.screen_text())
        assert [(r["method"], r["params"]) for r in server.requests] == [
            ("auth_test", {"key": KEY}),
            ("auth_login", {"key": KEY, "test": False}),
        ]
        await pilot.press("escape")
        server.push(auth=auth("registered"), node=fake.node("IDLE"))
        await until(pilot, lambda: "Welcome" not in app.screen_text())


@pytest.mark.asyncio
async def test_a_refused_key_can_be_mended(path: Path) -> None:
    async with live(path, without_key()) as (app, pilot, server):
        server.respond = Hub(refuse="[red] this token is unknown")
        await pilot.press("a", *"dtj_", *"k" * 30, "enter")
        await until(pilot, lambda: "[red] this token is unknown. ask the operator" in app.screen_text())
        server.respond = Hub()
        await pilot.press("x")
        assert "unknown" not in app.screen_text()
        await pilot.press("enter")
        await until(pilot, lambda: "Keep this key?" in app.screen_text())
        await pilot.press("escape")
        assert [r["params"]["key"] for r in server.requests] == ["dtj_" + "k" * 30, "dtj_" + "k" * 30 + "x"]


@pytest.mark.asyncio
async def test_escape_while_it_is_tried_drops_the_key(path: Path) -> None:
    async with live(path, without_key()) as (app, pilot, server):
        server.mute = True
        await pilot.press("a", *"dtj_", *"k" * 30, "enter")
        await until(pilot, lambda: "Asking the hub" in app.screen_text())
        await until(pilot, lambda: bool(server.requests))
        await pilot.press("escape")
        server.answer_late()
        await pilot.pause()
        assert "Keep this key?" not in app.screen_text()
        assert [r["method"] for r in server.requests] == ["auth_test"]
