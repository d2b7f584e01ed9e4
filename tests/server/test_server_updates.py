"""The update check: nothing without consent, once a day at most, nothing believed that is not well formed."""

from __future__ import annotations

import asyncio
import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import Running, ShiftedClock, events, eventually, supervisor_running

from distensor import __version__
from distensor_server.node import FeatureFactory
from distensor_server.supervisor import FEATURES
from distensor_server.updates import (
    LARGEST_INDEX,
    Release,
    UpdateCheck,
    command_for,
    fetch_https,
    is_newer,
    parse_index,
)

DIGEST = "0123456789abcdef" * 4
INDEX = "https://updates.example/distensor.json"
ON = {"update_check": True, "update_index": INDEX}


def index(version: str = "9.1.0", **more: Any) -> bytes:
    return json.dumps({"v": 1, "version": version, "sha256": DIGEST, **more}).encode()


class Server:
    """Answers with `content`, or raises it."""

    def __init__(self, content: bytes | OSError) -> None:
        self.content = content
        self.asked: list[str] = []

    def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        if isinstance(self.content, OSError):
            raise self.content
        return self.content


def with_fetch(fetch: Callable[[str], bytes]) -> list[FeatureFactory]:
    """The features of every supervisor, with another way to fetch."""
    others = [feature for feature in FEATURES if feature is not UpdateCheck]
    return [*others, lambda node: UpdateCheck(node, fetch=fetch)]


def section(running: Running) -> dict[str, Any]:
    value: dict[str, Any] = running.sections()["update"]
    return value


@pytest.mark.asyncio
async def test_without_consent_nobody_is_asked_and_with_it_the_command_is_shown(short_dir: Path) -> None:
    server = Server(index())
    config = short_dir / "server.toml"
    config.write_text(f'update_index = "{INDEX}"\n')
    options: dict[str, Any] = {"config_file": config, "overrides": None}
    async with supervisor_running(short_dir, all_features=with_fetch(server.fetch), **options) as running:
        await asyncio.sleep(0.05)
        assert server.asked == []
        assert section(running) == {
            "consent": False,
            "checked_at": None,
            "error": None,
            "available": None,
            "sha256": None,
            "command": None,
        }
        config.write_text(f'update_index = "{INDEX}"\nupdate_check = true\n')
        running.supervisor.reload()
        await eventually(lambda: section(running)["available"] == "9.1.0", "seen")
        assert server.asked == [INDEX]
        assert section(running)["sha256"] == DIGEST
        command = "pip install --upgrade distensor-server==9.1.0"
        assert section(running)["command"] == command
        assert f"version 9.1.0 is available: {command}" in events(running)


@pytest.mark.asyncio
async def test_once_a_day_also_across_restarts_and_failures(short_dir: Path) -> None:
    server, clock = Server(OSError("no route to host")), ShiftedClock()
    features = with_fetch(server.fetch)
    for _ in range(2):
        async with supervisor_running(short_dir, all_features=features, clock=clock, overrides=ON) as running:
            await eventually(lambda running=running: section(running)["error"], "told")
            assert section(running)["error"] == f"{INDEX}: no route to host"
    assert len(server.asked) == 1
    server.content = index()
    clock.wall_by += 86401
    async with supervisor_running(short_dir, all_features=features, clock=clock, overrides=ON) as running:
        await eventually(lambda: section(running)["available"], "seen")
        assert section(running)["error"] is None
    server.content = OSError("away again")
    clock.wall_by += 86401
    async with supervisor_running(short_dir, all_features=features, clock=clock, overrides=ON) as running:
        await eventually(lambda: section(running)["error"], "told")
        assert section(running)["available"] == "9.1.0", "a server that is away takes no version back"
        assert not any("is available" in text for text in events(running)), "told before"
    assert len(server.asked) == 3


@pytest.mark.asyncio
async def test_a_clock_that_was_wrong_does_not_put_the_check_off_for_years(short_dir: Path) -> None:
    server, clock = Server(index()), ShiftedClock()
    features = with_fetch(server.fetch)
    clock.wall_by = 10 * 365 * 86400.0
    for years in (10, 0):
        clock.wall_by = years * 365 * 86400.0
        async with supervisor_running(short_dir, all_features=features, clock=clock, overrides=ON):
            await eventually(lambda years=years: len(server.asked) == (1 if years else 2), "asked")


@pytest.mark.parametrize("content", ["{}", '{"at": "x", "release": null}', '{"at": 1, "release": {"version": 5}}', "["])
@pytest.mark.asyncio
async def test_a_damaged_memory_is_like_none(short_dir: Path, content: str) -> None:
    (short_dir / "state").mkdir()
    (short_dir / "state/update.json").write_text(content)
    server = Server(index())
    async with supervisor_running(short_dir, all_features=with_fetch(server.fetch), overrides=ON) as running:
        await eventually(lambda: section(running)["available"], "asked again")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"[1]", 'not a JSON object with "v": 1'),
        (b'{"v": 2}', 'not a JSON object with "v": 1'),
        (index("1.2"), "version '1.2', expected three numbers like 0.2.0"),
        (index("1.2.3; rm -rf ~"), "expected three numbers"),
        (index(version=7), "version 7"),
        (index(sha256="abc"), "expected 64 hex digits"),
        (b" " * (LARGEST_INDEX + 1), f"more than {LARGEST_INDEX} bytes"),
    ],
)
def test_an_index_that_is_not_one_is_refused_with_the_reason(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=r".*") as caught:
        parse_index(content)
    assert words in str(caught.value)


def test_a_good_index_is_read() -> None:
    assert parse_index(index("0.2.0", more="later")) == Release(version="0.2.0", sha256=DIGEST)


VERSIONS = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))


@given(VERSIONS, VERSIONS)
def test_newer_is_by_numbers_not_by_letters(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert is_newer(".".join(map(str, first)), ".".join(map(str, second))) == (first > second)


def test_a_version_of_a_developer_is_left_alone() -> None:
    assert not is_newer("0.2.0", "unknown")
    assert not is_newer("0.2.0.dev1", "0.1.0")
    assert is_newer("0.2.0", "0.1.0.dev3")


def test_the_command_is_that_of_the_way_it_was_installed(tmp_path: Path) -> None:
    release = Release(version="0.2.0", sha256=DIGEST)
    environment = tmp_path / "env-0.1.0"
    environment.mkdir()
    assert command_for(release, environment) == "pip install --upgrade distensor-server==0.2.0"
    (tmp_path / "current").symlink_to(environment)
    assert command_for(release, environment) == "run the installer again: it updates and keeps all settings"


@pytest.mark.parametrize("url", ["http://updates.example/x", "file:///etc/passwd", "ftp://x/y"])
def test_only_https_is_fetched(url: str) -> None:
    with pytest.raises(OSError, match="not an https address"):
        fetch_https(url)


class Answers(http.server.BaseHTTPRequestHandler):
    """/index answers, /away leads to plain HTTP, /round to /index."""

    def do_GET(self) -> None:
        target = {"/away": "http://updates.example/", "/round": "/index"}.get(self.path)
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.end_headers()
        if not target:
            self.server.agents.append(self.headers["User-Agent"])  # type: ignore[attr-defined]
            self.wfile.write(index())

    def log_message(self, *_given: Any) -> None:
        pass


@pytest.fixture
def https_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("no_proxy", "*")
    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    server.agents = []  # type: ignore[attr-defined]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_real_fetcher_follows_https_only_and_tells_nothing_of_the_node(
    https_server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"https://127.0.0.1:{https_server.server_address[1]}"
    assert parse_index(fetch_https(f"{base}/index")).version == "9.1.0"
    assert parse_index(fetch_https(f"{base}/round")).version == "9.1.0"
    with pytest.raises(OSError, match=r"refused to follow a redirect to 'http://updates\.example/'"):
        fetch_https(f"{base}/away")
    assert set(https_server.agents) == {f"distensor-server/{__version__}"}  # type: ignore[attr-defined]
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch_https(f"{base}/index")
