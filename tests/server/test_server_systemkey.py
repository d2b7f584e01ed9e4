"""The key of the machine's own service: where it goes, who may read it, and what is restarted."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from service_fakes import FakeSystemctl

from distensor.comm.address import parse_address
from distensor.comm.tokens import JoinToken, Role
from distensor.core.errors import AuthenticationError, HubUnreachableError
from distensor_server.keyfeature import refusal
from distensor_server.service import actions
from distensor_server.service.layout import system_layout
from distensor_server.service.manifest import Manifest
from distensor_server.service.systemd import Systemd
from distensor_server.verbs import auth, output
from distensor_server.verbs.systemkey import SystemKey

TOKEN = JoinToken(address=parse_address("hub.example:50051"), fingerprint="ab" * 32, role=Role.NODE, secret="s" * 43)
KEY = TOKEN.encode()


async def knows(_key: str) -> JoinToken:
    return TOKEN


async def is_away(_key: str) -> JoinToken:
    raise HubUnreachableError("no hub answers at hub.example:50051")


class Machine:
    """A machine below `root` whose service was installed, or not."""

    def __init__(self, root: Path, *, service: bool = True, uid: int = 0) -> None:
        self.layout = system_layout(root)
        self.ctl = FakeSystemctl()
        self.said: list[str] = []
        manager = Systemd(self.layout, Path("/opt/distensor/current/bin/distensor-server"), self.ctl, list)
        if service:
            actions.install(manager, Manifest(self.layout.manifest), lambda _line: None)
            self.ctl.calls.clear()
        self.key = SystemKey(layout=self.layout, manager=manager, uid=uid, say=self.said.append)

    @property
    def unit(self) -> str:
        return (self.layout.unit_folder / "distensor.service").read_text()

    @property
    def restarts(self) -> int:
        return sum("restart" in call for call in self.ctl.calls)


def test_login_keeps_the_key_where_only_root_reads_it_and_the_unit_names_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert "LoadCredential" not in machine.unit
    told = machine.key.log_in(f" {KEY}\n", test=True, check=knows)
    assert (told["source"], told["hub"], told["supervisor"]) == ("credentials", "hub.example:50051", "restarted")
    assert KEY not in str(told)
    file = machine.layout.key_file
    assert (file.read_text(), file.stat().st_mode & 0o777) == (f"{KEY}\n", 0o600)
    assert file.parent.stat().st_mode & 0o777 == 0o755  # the invented user has to see which files are not there
    assert f"\nLoadCredential=distensor_api_key:{file}\n" in machine.unit
    assert KEY not in machine.unit
    assert machine.restarts == 1
    assert "running work has up to two minutes" in machine.said[0]


def test_logout_removes_it_sets_the_identity_aside_and_the_unit_starts_without(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.key.log_in(KEY, test=False)
    machine.layout.state.mkdir(parents=True)
    credential = machine.layout.state / "credential.json"
    credential.write_text("{}")
    told = machine.key.log_out()
    assert told["removed"] == [str(machine.layout.key_file)]
    assert told["identity"] == str(credential.with_name("credential.logged-out.json"))
    assert not credential.exists()
    assert "LoadCredential" not in machine.unit
    assert machine.restarts == 2


def test_before_there_is_a_service_only_the_key_is_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path, service=False)
    assert machine.key.log_in(KEY, test=True, check=knows)["supervisor"] == "not installed"
    assert machine.layout.key_file.exists()
    assert machine.ctl.calls == []


def test_what_is_no_good_changes_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with pytest.raises(HubUnreachableError):
        machine.key.log_in(KEY, test=True, check=is_away)
    with pytest.raises(AuthenticationError, match="altered"):
        machine.key.log_in(KEY[:-1] + ("0" if KEY[-1] != "0" else "1"), test=False)
    for ask in (lambda key: key.log_in(KEY, test=False), lambda key: key.log_out()):
        with pytest.raises(AuthenticationError, match="put sudo in front of it"):
            ask(Machine(tmp_path / "other", uid=1000).key)
    assert not machine.layout.key_file.exists()
    assert machine.restarts == 0


def test_the_command_of_somebody_else_says_sudo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(auth.os, "geteuid", lambda: 1000)
    assert auth.main(["logout", "--system", "--json"]) == 77
    assert "put sudo in front of it" in capsys.readouterr().out


def test_where_system_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing = {"socket": None, "state": None}
    system = argparse.Namespace(**nothing, system=True)
    assert output.places(system) == output.Places(
        socket=Path("/run/distensor/supervisor.sock"), state=Path("/var/lib/private/distensor")
    )
    monkeypatch.setenv("DISTENSOR_SOCKET", str(tmp_path / "own.sock"))
    monkeypatch.setattr(output, "SYSTEM_SOCKET", tmp_path / "system.sock")
    assert output.places(argparse.Namespace(**nothing)).socket == tmp_path / "own.sock"
    (tmp_path / "system.sock").touch()  # root sees it, and there is none of its own
    assert output.places(argparse.Namespace(**nothing)).socket == tmp_path / "system.sock"
    (tmp_path / "own.sock").touch()
    assert output.places(argparse.Namespace(**nothing)).socket == tmp_path / "own.sock"


def test_a_service_that_may_not_write_its_configuration_says_what_to_run() -> None:
    from distensor.core.errors import StoreError

    error = StoreError("key file /etc/distensor/api_key: Read-only file system")
    assert refusal(error, by_systemd=True).fix == "sudo distensor auth login --system"
    assert "writable" in refusal(error).fix
