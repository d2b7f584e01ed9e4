"""Configuration, token, environment and sd_notify."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from server_fakes import settings_in

from distensor.core.errors import ConfigError
from distensor_server.config import (
    Limits,
    Settings,
    default_name,
    default_socket_path,
    default_state_dir,
    is_loopback,
    read_settings_file,
)
from distensor_server.environment import scrubbed
from distensor_server.notify import Notifier


def test_the_environment_of_a_worker_is_an_allow_list() -> None:
    owner = {"PATH": "/bin", "LC_ALL": "C", "HOME": "/h", "AWS_SECRET_ACCESS_KEY": "s", "DISTENSOR_JOIN_TOKEN": "s"}
    owner |= {"HF_TOKEN": "s", "SSH_AUTH_SOCK": "s", "NOTIFY_SOCKET": "s", "CREDENTIALS_DIRECTORY": "s"}
    assert scrubbed(owner, {"OMP_NUM_THREADS": "2"}) == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HOME": "/h",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
    }


def test_limits_come_from_the_command_line_then_the_file_then_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("cpu_workers = 3\ndrain_seconds = 20\n")
    assert Limits() == Limits(cpu_workers=1, drain_seconds=90.0)
    settings = settings_in(tmp_path, config_file=file, overrides={"cpu_workers": 5})
    assert settings.limits() == Limits(cpu_workers=5, drain_seconds=20)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_settings_file(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 64, "a/b", "ä"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        Settings(state_dir=tmp_path, socket_path=tmp_path / "s", name=name)


def test_a_host_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host"):
        Settings(state_dir=tmp_path, socket_path=tmp_path / "s", name="a", host="a b")


@pytest.mark.parametrize(
    ("host", "name"), [("atlas-3.example.org", "atlas-3"), ("Jo's Mac", "Jo-s-Mac"), ("_", "node")]
)
def test_the_default_name_is_a_valid_one(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert default_name() == name


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1:50051", True),
        ("localhost:50051", True),
        ("::1", True),
        ("[::1]:50051", True),
        ("10.0.0.5:50051", False),
        ("hub.example.org", False),
        ("fe80::1", False),
        ("[fe80::1]:50051", False),
    ],
)
def test_what_only_this_machine_can_reach(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_default_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    user = tmp_path / "state" / "distensor"
    runtime = tmp_path / "run"
    assert default_state_dir({"STATE_DIRECTORY": "/var/lib/d:/x"}) == Path("/var/lib/d")
    assert default_state_dir({}) == user / "server"
    assert default_socket_path({"DISTENSOR_SOCKET": "/x.sock"}, "linux") == Path("/x.sock")
    assert default_socket_path({"XDG_RUNTIME_DIR": str(runtime)}, "linux") == user / "supervisor.sock"
    (runtime / "distensor").mkdir(parents=True)
    assert default_socket_path({"XDG_RUNTIME_DIR": str(runtime)}, "linux") == runtime / "distensor" / "supervisor.sock"
    assert default_socket_path({"XDG_RUNTIME_DIR": str(runtime)}, "darwin") == user / "supervisor.sock"


def test_systemd_is_told(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "30000000"})
        assert notifier.watchdog_interval == 15.0
        notifier.ready()
        notifier.status("IDLE")
        notifier.status("IDLE")
        notifier.alive()
        notifier.reloading(1.5)
        notifier.stopping(95)
        told = [manager.recv(1000) for _ in range(5)]
    reloading = b"RELOADING=1\nMONOTONIC_USEC=1500000"
    stopping = b"STOPPING=1\nEXTEND_TIMEOUT_USEC=95000000"
    assert told == [b"READY=1", b"STATUS=IDLE", b"WATCHDOG=1", reloading, stopping]
    notifier.alive()  # the manager is gone: nothing happens


def test_systemds_abstract_socket() -> None:
    name = f"distensor-test-{id(object())}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        manager.settimeout(5)
        Notifier({"NOTIFY_SOCKET": "@" + name}).ready()
        assert manager.recv(100) == b"READY=1"


def test_without_systemd_nothing_is_told() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "nonsense"})
    assert notifier.watchdog_interval is None
    notifier.ready()
