"""The key of the running supervisor and the command `auth`, with planted keys that may appear nowhere."""

from __future__ import annotations

import asyncio
import getpass
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_fakes import Running, events, eventually, supervisor_running, wait_until
from server_processes import Child, closing, sections, start_hub

from distensor.comm import LinkError, LinkState
from distensor.comm.address import parse_address
from distensor.comm.tokens import JoinToken, Role, decode_token
from distensor.core.errors import AuthenticationError, HubProtocolError, HubUnreachableError
from distensor_server import localclient
from distensor_server.keyfeature import KeyFeature
from distensor_server.keys.chain import KEY_FILE, KeyStore
from distensor_server.keys.identity import ASIDE, bring_back, set_aside
from distensor_server.keys.model import FoundKey, KeySource
from distensor_server.keys.ring import KeyRing
from distensor_server.localserver import RequestError
from distensor_server.verbs import auth


def made(role: Role = Role.NODE, secret: str = "S" * 32, address: str = "127.0.0.1:9") -> str:
    return JoinToken(address=parse_address(address), fingerprint="0" * 64, role=role, secret=secret).encode()


KEY = made()
FOUND = FoundKey(key=KEY, source=KeySource.FILE, where="/etc/key")


def no_ring() -> KeyRing:
    return KeyRing({}, command=["/nonexistent"])


def keyed(config: Path, found: FoundKey | None = None, failure: Exception | None = None) -> Any:
    """A factory of the feature, whose hub knows every key or fails like this."""

    async def check(key: str) -> JoinToken:
        if failure is not None:
            raise failure
        return decode_token(key)

    return partial(KeyFeature, found=found, store=KeyStore(config, no_ring()), check=check)


async def method(running: Running, name: str, **params: Any) -> dict[str, Any]:
    found = await asyncio.to_thread(localclient.ask, running.supervisor.node.settings.socket_path, name, params)
    return dict(found)


def shown(running: Running) -> dict[str, Any]:
    return running.sections()


def key_gate(running: Running) -> dict[str, Any]:
    gates: list[dict[str, Any]] = shown(running)["node"]["why"]
    return next(gate for gate in gates if gate["gate"] == "key")


@pytest.mark.asyncio
async def test_without_a_key_it_waits_and_says_the_next_step(short_dir: Path) -> None:
    async with supervisor_running(short_dir, features=[keyed(short_dir / "config")]) as running:
        running.link.show(LinkState.NO_KEY, error=LinkError(code="no_key", message="no key", fix="login"))
        await eventually(lambda: shown(running)["node"]["state"] == "WAITING", "it waits for a key")
        gate = key_gate(running)
        assert (gate["open"], "distensor auth login" in gate["reading"]) == (False, True)
        hub = next(gate for gate in shown(running)["node"]["why"] if gate["gate"] == "hub")
        assert (hub["open"], hub["reading"]) == (False, "no key")
        assert not [told for told in events(running) if "login" in told and "no key yet" not in told]  # said once
        assert shown(running)["auth"]["state"] == "missing"
        assert "distensor auth login" in shown(running)["auth"]["fix"]
        assert not running.task.done()


@pytest.mark.asyncio
async def test_a_login_tests_keeps_and_uses_the_key_and_shows_it_nowhere(short_dir: Path) -> None:
    async with supervisor_running(short_dir, features=[keyed(short_dir / "config")]) as running:
        assert await method(running, "auth_test", key=KEY) == {"hub": "127.0.0.1:9", "fingerprint": "0" * 64}
        assert running.link.tokens == []
        result = await method(running, "auth_login", key=f" {KEY}\n")
        assert (result["source"], result["tested"], result["hub"]) == ("file", True, "127.0.0.1:9")
        assert (short_dir / "config" / KEY_FILE).read_text().strip() == KEY
        assert running.link.tokens == [KEY]
        everything = json.dumps(shown(running)) + json.dumps(result)
        assert KEY not in everything
        assert KEY[4:-4] not in everything
        assert key_gate(running)["open"] is True
        logged_out = await method(running, "auth_logout")
        assert logged_out == {"removed": [str(short_dir / "config" / KEY_FILE)], "identity": None}
        assert running.link.tokens == [KEY, None]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (AuthenticationError("the hub does not know this join token"), "key_refused"),
        (HubUnreachableError("no hub at 127.0.0.1:9"), "hub_unreachable"),
        (HubProtocolError("no TLS"), "not_a_hub"),
    ],
)
async def test_a_key_that_fails_is_not_kept_and_the_old_one_stays(
    short_dir: Path, failure: Exception, code: str
) -> None:
    features = [keyed(short_dir / "config", found=FOUND, failure=failure)]
    async with supervisor_running(short_dir, features=features) as running:
        for name in ("auth_test", "auth_login"):
            with pytest.raises(RequestError) as caught:
                await method(running, name, key=KEY)
            assert (caught.value.code, caught.value.message) == (code, str(failure))
            assert caught.value.fix
        assert not (short_dir / "config").exists()
        assert running.link.tokens == []
        untried = await method(running, "auth_login", key=KEY, test=False)
        assert untried["tested"] is False


@pytest.mark.asyncio
async def test_requests_that_are_none_are_refused(short_dir: Path) -> None:
    async with supervisor_running(short_dir, features=[keyed(short_dir / "config")]) as running:
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("auth_test", {}),
            ("auth_test", {"key": 1}),
            ("auth_test", {"key": " "}),
            ("auth_test", {"key": KEY, "test": True}),
            ("auth_login", {"key": KEY, "test": "no"}),
            ("auth_login", {"key": "x" * 5000}),
            ("auth_logout", {"key": KEY}),
        ]
        for name, params in wrong:
            with pytest.raises(RequestError) as caught:
                await method(running, name, **params)
            assert caught.value.code == "bad_params"
            assert KEY not in caught.value.message
        for key in (made(Role.TRAINER), KEY[:-3], "dt_p_" + "x" * 30):
            with pytest.raises(RequestError) as caught:
                await method(running, "auth_login", key=key, test=False)
            assert caught.value.code == "key_refused"
            assert key not in caught.value.message


@pytest.mark.asyncio
async def test_a_refused_key_is_shown_with_its_fix_and_nothing_restarts(short_dir: Path) -> None:
    async with supervisor_running(short_dir, features=[keyed(short_dir / "config", found=FOUND)]) as running:
        error = LinkError(code="authentication", message="the hub does not know this join token", fix="x")
        running.link.show(LinkState.REJECTED, error=error)
        section = shown(running)["auth"]
        assert (section["state"], section["problem"]) == ("rejected", error.message)
        assert "distensor auth login" in section["fix"]
        assert (section["source"], section["where"]) == ("file", "/etc/key")
        assert "does not know" in key_gate(running)["reading"]
        assert not running.task.done()


# identity


def test_an_identity_that_is_no_more_is_none(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "credential.json") is None
    assert bring_back(tmp_path / "credential.json", "0" * 64) is False
    (tmp_path / ASIDE).write_text("damaged")
    assert bring_back(tmp_path / "credential.json", "0" * 64) is False


# the command


@pytest.fixture
def places(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own without a keyring and without a key in the environment."""
    for name in ("DISTENSOR_API_KEY", "DISTENSOR_JOIN_TOKEN", "DBUS_SESSION_BUS_ADDRESS", "CONFIGURATION_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(short_dir / "config"))
    monkeypatch.setenv("DISTENSOR_SOCKET", str(short_dir / "s.sock"))
    monkeypatch.setenv("STATE_DIRECTORY", str(short_dir / "state"))
    monkeypatch.setattr(auth, "KeyRing", lambda environment: no_ring())
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return short_dir


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_key_in_argv_is_refused_with_the_reason_and_not_repeated(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["login", KEY], ["login", "--key", KEY], [KEY], ["login", f"--key={KEY}", "--json"]):
        assert auth.main(words) == 64
        said = capsys.readouterr()
        assert KEY not in said.out + said.err
    assert auth.main(["login", KEY]) == 64
    assert "can be read by every user of this machine" in capsys.readouterr().err


def test_login_without_a_terminal_or_key(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert auth.main(["login"]) == 64
    assert "login --stdin < FILE" in capsys.readouterr().err
    assert auth.main(["login", "--stdin", "--json"]) == 64
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "no_key"


def test_a_key_from_the_terminal_is_asked_for_without_echo(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(getpass, "getpass", lambda prompt: KEY)
    assert auth.main(["login", "--no-test"]) == 0
    said = capsys.readouterr().out
    assert "the hub was not asked" in said
    assert KEY not in said


def test_login_status_and_logout_without_a_supervisor(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*words: str) -> dict[str, Any]:
        assert auth.main([*words, "--json"]) == 0
        value: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (value["v"], value["ok"]) == (1, True)
        assert KEY not in json.dumps(value)
        return value

    assert answer("status")["state"] == "missing"
    typed(monkeypatch, KEY + "\n")
    kept = answer("login", "--stdin", "--no-test")
    file = places / "config/distensor" / KEY_FILE
    assert (kept["where"], kept["supervisor"], file.stat().st_mode & 0o777) == (str(file), "not running", 0o600)
    status = answer("status")
    assert (status["state"], status["source"], status["supervisor"]) == ("unproven", "file", "not_running")
    assert answer("logout")["removed"] == [str(file)]
    assert auth.main(["logout"]) == 0
    assert "no stored key" in capsys.readouterr().out


def test_a_hub_that_is_away_is_69_and_a_bad_key_77(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, KEY)
    assert auth.main(["login", "--stdin"]) == 69
    assert "no hub at 127.0.0.1:9" in capsys.readouterr().err
    typed(monkeypatch, KEY[:-2])
    assert auth.main(["login", "--stdin"]) == 77
    file = places / "config/distensor" / KEY_FILE
    assert not file.exists()
    file.parent.mkdir(parents=True)
    file.write_text(KEY)
    file.chmod(0o644)
    capsys.readouterr()
    assert auth.main(["status"]) == 77
    assert "chmod 600" in capsys.readouterr().err


# for real


@pytest.fixture
def hub(short_dir: Path) -> Iterator[Child]:
    with closing(start_hub(short_dir)) as child:
        yield child


def start_keyless(directory: Path) -> Child:
    command = [sys.executable, "-m", "distensor_server", "run", "--state", str(directory / "state"), "--json"]
    command += ["--socket", str(directory / "s.sock"), "--name", "atlas-3", "--cpu-workers", "0"]
    return Child(command, directory / "server.log")


def test_from_no_key_to_registered_with_a_real_hub(
    places: Path, hub: Child, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SEC-01: the key is in no command line and no environment of any process, and in no log."""
    key = hub.line()["node_tokens"][0]
    unknown = JoinToken(**{**_fields(key), "secret": "U" * 32}).encode()
    with closing(start_keyless(places)) as server:
        assert server.line()["event"] == "ready"
        wait_until(lambda: sections(places)["node"]["state"] == "WAITING", "it waits for a key")
        typed(monkeypatch, unknown)
        assert auth.main(["login", "--stdin"]) == 77
        assert "does not know this join token" in capsys.readouterr().err
        typed(monkeypatch, key)
        assert auth.main(["login", "--stdin"]) == 0
        assert "the running supervisor uses it now" in capsys.readouterr().out
        assert server.line()["event"] == "connected"
        assert auth.main(["status", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["state"], status["supervisor"], status["source"]) == ("registered", "running", "file")
        assert status["node_id"].startswith("n_")
        for process in (server.pid, hub.pid, *(child.pid for child in psutil.Process(server.pid).children())):
            for part in ("cmdline", "environ"):
                assert key.encode() not in Path(f"/proc/{process}/{part}").read_bytes()
        assert auth.main(["logout", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["identity"].endswith(ASIDE)
        wait_until(lambda: sections(places)["node"]["state"] == "WAITING", "it waits for a key again")
        typed(monkeypatch, key)
        assert auth.main(["login", "--stdin"]) == 77
        assert "has been used already" in capsys.readouterr().err
        assert server.end() == 0
    logs = [path.read_text(errors="replace") for path in places.rglob("*.log")]
    assert not [log for log in logs if key in log or unknown in log]


def _fields(key: str) -> dict[str, Any]:
    token = decode_token(key)
    return {name: getattr(token, name) for name in ("address", "fingerprint", "role", "secret")}


def test_a_key_file_that_others_can_read_ends_the_start_with_77(places: Path) -> None:
    file = places / "config/distensor" / KEY_FILE
    file.parent.mkdir(parents=True)
    file.write_text(KEY)
    file.chmod(0o640)
    command = [sys.executable, "-m", "distensor_server", "run", "--state", str(places / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == 77
    assert "others can read it; run `chmod 600" in done.stderr
    assert KEY not in done.stderr


@pytest.mark.parametrize("verb", ["auth", "doctor", "bugreport", "service"])
def test_completion_knows_the_options_that_the_command_has(
    verb: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row in the table of commands is another wheel's: what it promises has to be in the help."""
    table = pytest.importorskip("distensor_tui.table")
    module = {"service": "distensor_server.service.cli"}.get(verb, f"distensor_server.verbs.{verb}")
    row = table.BY_NAME[verb]
    shown = ""
    for word in row.words or ("",):
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main([*([word] if word else []), "--help"])
        assert ended.value.code == 0
        shown += capsys.readouterr().out
    assert [flag for flag in row.flags if flag not in shown] == []
