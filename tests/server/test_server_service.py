"""The service: unit files, the calls to systemd and launchd, and what stays when one of them fails."""

from __future__ import annotations

import json
import plistlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry, Resource
from service_fakes import PRINTED, FakeLaunchctl, FakeSystemctl

from distensor.core.errors import ConfigError, ServiceError, StoreError
from distensor.core.reading import Unavailable
from distensor.testing.clock import FakeClock
from distensor_server.cli import code_for_launchd
from distensor_server.service import actions, cli
from distensor_server.service.launchd import Launchd, parse_print
from distensor_server.service.layout import Layout, program, system_layout, user_layout
from distensor_server.service.manager import ServiceState
from distensor_server.service.manifest import Entry, Kind, Manifest
from distensor_server.service.ownership import Owner, marked, owner_of
from distensor_server.service.runner import run_command
from distensor_server.service.systemd import Systemd, quoted

Run = Callable[..., object]
AWKWARD = ("plain", "with space", "R&D <lab>", "100%", "$HOME", "Müller 宇宙")
UNSAFE = ('quo"te', "it's", "back\\slash", "a\nExecStartPre=/bin/evil")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="apt install systemd")


class JumpingClock(FakeClock):
    """Who sleeps makes the time pass."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


def linux(home: Path) -> Layout:
    return user_layout({"HOME": str(home)}, "linux")


def mac(home: Path) -> Layout:
    return user_layout({"HOME": str(home)}, "darwin")


def systemd(home: Path, run: FakeSystemctl) -> Systemd:
    return Systemd(linux(home), home / "venv/bin/distensor-server", run)


def launchd(home: Path, run: FakeLaunchctl) -> Launchd:
    return Launchd(mac(home), home / "venv/bin/distensor-server", run, JumpingClock(), 501)


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def install_on_linux(home: Path, run: FakeSystemctl) -> list[str]:
    said: list[str] = []
    actions.install(systemd(home, run), Manifest(linux(home).manifest), said.append)
    return said


# -- unit files


def test_the_user_unit_has_what_the_contract_asks_for(tmp_path: Path) -> None:
    text = systemd(tmp_path, FakeSystemctl()).render()
    for line in (
        "Type=notify",
        "WatchdogSec=60",
        "Restart=on-failure",
        "RestartPreventExitStatus=77 78",
        "TimeoutStopSec=120",
        "NoNewPrivileges=yes",
        f'ExecStart="{tmp_path}/venv/bin/distensor-server" run',
    ):
        assert f"\n{line}\n" in text
    assert "@" not in text


def test_the_system_unit_names_only_groups_of_this_machine_and_a_key_that_is_there(tmp_path: Path) -> None:
    layout = system_layout(tmp_path)
    unit = Systemd(layout, Path("/opt/x/bin/distensor-server"), FakeSystemctl(), lambda: ["render"])
    text = unit.render()
    assert "\nSupplementaryGroups=render\n" in text
    assert "LoadCredential" not in text
    layout.config.mkdir(parents=True)
    layout.key_file.write_text("dtj_secret")
    assert f"\nLoadCredential=distensor_api_key:{layout.key_file}\n" in unit.render()
    assert "dtj_secret" not in unit.render()
    assert "\nConfigurationDirectoryMode=0755\n" in text  # else the invented user cannot see that there is no key
    assert "SupplementaryGroups" not in Systemd(layout, Path("/x"), FakeSystemctl(), list).render()


@needs_systemd
def test_the_system_unit_is_closed_and_systemd_finds_no_fault(tmp_path: Path, run: Callable[..., object]) -> None:
    unit = tmp_path / "distensor.service"
    unit.write_text(Systemd(system_layout(tmp_path), Path("/bin/true"), FakeSystemctl(), list).render())
    judged = run(["systemd-analyze", "security", "--offline=true", "--no-pager", unit])
    line = next(line for line in judged.stdout.splitlines() if "Overall exposure level" in line)
    exposure = float(line.split(":")[1].split()[0])
    print(f"exposure {exposure}, limit 2.0")
    assert exposure <= 2.0
    checked = run(["systemd-analyze", "verify", unit])
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("folder", AWKWARD)
def test_systemd_reads_the_unit_of_any_home(tmp_path: Path, run: Callable[..., object], folder: str) -> None:
    """`verify` says when the program of ExecStart= is not there, so a name that was read wrongly is noticed."""
    server = tmp_path / folder / "distensor-server"
    server.parent.mkdir()
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    unit = tmp_path / "distensor.service"
    unit.write_text(Systemd(linux(tmp_path), server, FakeSystemctl()).render())
    checked = run(["systemd-analyze", "--user", "verify", unit], env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/"})
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.parametrize("name", UNSAFE)
def test_what_systemd_refuses_is_said_before(name: str) -> None:
    with pytest.raises(ConfigError, match="systemd refuses"):
        quoted(f"/home/{name}/distensor-server")


@pytest.mark.parametrize("folder", [*AWKWARD, *UNSAFE[:3]])
def test_ins_05_the_plist_parses_whatever_the_home_is_called(tmp_path: Path, folder: str) -> None:
    home = tmp_path / folder
    content = plistlib.loads(launchd(home, FakeLaunchctl()).render().encode())
    assert content["ProgramArguments"] == [str(home / "venv/bin/distensor-server"), "run", "--launchd"]
    assert content["StandardErrorPath"] == str(home / "Library/Logs/distensor/service.log")
    assert (content["KeepAlive"], content["ExitTimeOut"]) == ({"SuccessfulExit": False}, 120)


@pytest.mark.parametrize(("code", "told"), [(0, 0), (70, 70), (75, 75), (77, 0), (78, 0)])
def test_launchd_is_told_to_leave_alone_what_a_restart_cannot_repair(
    code: int, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_for_launchd(code) == told
    assert (str(code) in capsys.readouterr().err) == (code != told)


# -- systemd


def test_install_writes_starts_and_records_and_uninstall_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    (tmp_path / ".config").mkdir()
    before = tree(tmp_path)
    ctl = FakeSystemctl()
    assert install_on_linux(tmp_path, ctl)[-1] == "started"
    assert ctl.active == "active"
    assert ctl.enabled
    again = install_on_linux(tmp_path, ctl)
    assert again[-1] == "started"
    manifest = Manifest(linux(tmp_path).manifest)
    assert [entry.path.name for entry in manifest.entries()] == ["systemd", "user", "distensor.service"]
    actions.uninstall(systemd(tmp_path, ctl), manifest, lambda _line: None)
    assert [path for path in tree(tmp_path) if not path.startswith(".local")] == before
    assert not manifest.path.exists()
    assert ctl.active == "inactive"
    said: list[str] = []
    actions.uninstall(systemd(tmp_path, ctl), manifest, said.append)
    assert said == ["there is no service"]


def test_who_asks_for_it_keeps_a_service_that_runs_from_the_same_unit(tmp_path: Path) -> None:
    ctl = FakeSystemctl()
    manifest, said = Manifest(linux(tmp_path).manifest), list[str]()
    for program_name, active, answer in (
        ("a", "inactive", "started"),
        ("a", "active", "it runs already"),
        ("a", "failed", "started"),
        ("b", "active", "started"),
    ):
        ctl.active = active
        ctl.calls.clear()
        manager = Systemd(linux(tmp_path), tmp_path / program_name, ctl)
        actions.install(manager, manifest, said.append, keep_running=True)
        assert said[-1] == answer
        assert any("restart" in call for call in ctl.calls) == (answer == "started")


def test_dry_runs_change_nothing_and_call_nothing(tmp_path: Path) -> None:
    ctl = FakeSystemctl()
    said: list[str] = []
    actions.install(systemd(tmp_path, ctl), Manifest(tmp_path / "m"), said.append, dry_run=True)
    assert "would write" in said[0]
    assert (tree(tmp_path), ctl.calls) == ([], [])


@pytest.mark.parametrize("step", ["daemon-reload", "enable", "restart"])
def test_ins_01_a_unit_that_cannot_be_started_is_not_left_behind(tmp_path: Path, step: str) -> None:
    ctl = FakeSystemctl(refuses={step: "Unit distensor.service is masked."})
    with pytest.raises(ServiceError, match=rf"{step}.*is masked"):
        install_on_linux(tmp_path, ctl)
    assert not (linux(tmp_path).unit_folder / "distensor.service").exists()
    assert not list(Manifest(linux(tmp_path).manifest).entries())
    ctl.refuses.clear()
    assert install_on_linux(tmp_path, ctl)[-1] == "started"


def test_a_unit_that_worked_comes_back_when_the_new_one_does_not_start(tmp_path: Path) -> None:
    ctl = FakeSystemctl()
    install_on_linux(tmp_path, ctl)
    old = (linux(tmp_path).unit_folder / "distensor.service").read_text()
    newer = Systemd(linux(tmp_path), tmp_path / "new/bin/distensor-server", _refuse_first(ctl, "restart"))
    with pytest.raises(ServiceError, match="no such program"):
        actions.install(newer, Manifest(linux(tmp_path).manifest), lambda _line: None)
    assert (linux(tmp_path).unit_folder / "distensor.service").read_text() == old
    assert ctl.active == "active"


def _refuse_first(ctl: FakeSystemctl, step: str) -> FakeSystemctl:
    class Once:
        done = False

        def __call__(self, *words: str) -> object:
            if step in words and not self.done:
                self.done = True
                ctl.refuses[step] = "no such program"
                try:
                    return ctl(*words)
                finally:
                    ctl.refuses.clear()
            return ctl(*words)

    return Once()  # type: ignore[return-value]


@pytest.mark.parametrize("content", ["[Service]\nExecStart=/usr/bin/mine\n", "changed"])
def test_a_unit_that_we_did_not_write_is_left_alone(tmp_path: Path, content: str) -> None:
    ctl = FakeSystemctl()
    path = linux(tmp_path).unit_folder / "distensor.service"
    if content == "changed":
        install_on_linux(tmp_path, ctl)
        content = path.read_text().replace("RestartSec=10", "RestartSec=1")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    ctl.calls.clear()
    with pytest.raises(ServiceError, match="left alone"):
        install_on_linux(tmp_path, ctl)
    assert path.read_text() == content
    assert ctl.calls == []


def test_without_an_instance_for_the_user_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"no instance for this user.*by hand"):
        install_on_linux(tmp_path, FakeSystemctl(reachable=False))
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("active", "last", "state"),
    [
        ("active", None, ServiceState.RUNNING),
        ("failed", 77, ServiceState.FAILED),
        ("inactive", 0, ServiceState.STOPPED),
    ],
)
def test_status_is_what_systemd_says(tmp_path: Path, active: str, last: int | None, state: ServiceState) -> None:
    ctl = FakeSystemctl()
    install_on_linux(tmp_path, ctl)
    ctl.active, ctl.last_exit = active, last
    found = systemd(tmp_path, ctl).status()
    assert found.state is state
    assert isinstance(found.pid, Unavailable) == (active != "active")
    assert (found.last_exit if last is not None else None) == last


def test_status_of_a_machine_without_systemd(tmp_path: Path) -> None:
    found = Systemd(linux(tmp_path), Path("/x"), lambda *_words: run_command("/no/such/systemctl")).status()
    assert found.state is ServiceState.NOT_INSTALLED


# -- launchd


def test_ins_03_bootout_comes_before_the_plist_is_removed(tmp_path: Path) -> None:
    ctl = FakeLaunchctl()
    manager, manifest = launchd(tmp_path, ctl), Manifest(mac(tmp_path).manifest)
    actions.install(manager, manifest, lambda _line: None)
    assert ctl.loaded == "gui/501"
    seen: list[bool] = []
    bootout = ctl._bootout
    ctl._bootout = lambda target: (seen.append(manager.unit_path.exists()), bootout(target))[1]  # type: ignore[method-assign]
    actions.uninstall(manager, manifest, lambda _line: None)
    assert seen == [True]
    assert ctl.loaded is None
    assert not manager.unit_path.exists()
    actions.uninstall(manager, manifest, lambda _line: None)


def test_ins_05_ten_restarts_of_an_agent_that_drains_for_long(tmp_path: Path) -> None:
    ctl = FakeLaunchctl(lingers=75)
    manager = launchd(tmp_path, ctl)
    for _ in range(10):
        manager.activate()
        assert manager.status().state is ServiceState.RUNNING
    assert ctl.bootstraps_while_there == 0


def test_an_agent_that_never_ends_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    manager = launchd(tmp_path, FakeLaunchctl(loaded="gui/501", lingers=10_000))
    with pytest.raises(ServiceError, match=r"did not end.*launchctl kill KILL gui/501"):
        manager.activate()


def test_over_ssh_the_domain_of_the_user_is_taken(tmp_path: Path) -> None:
    ctl = FakeLaunchctl(gui=False)
    manager = launchd(tmp_path, ctl)
    actions.install(manager, Manifest(mac(tmp_path).manifest), lambda _line: None)
    assert ctl.loaded == "user/501"
    assert manager.status().state is ServiceState.RUNNING


@pytest.mark.parametrize(("said", "code"), [("0", 0), ("78: EX_CONFIG", 78), ("(never exited)", None)])
def test_launchctl_print_is_read(tmp_path: Path, said: str, code: int | None) -> None:
    ctl = FakeLaunchctl(loaded="gui/501", last_exit=said, state="not running" if code else "running")
    found = launchd(tmp_path, ctl).status()
    assert (None if isinstance(found.last_exit, Unavailable) else found.last_exit) == code
    assert found.state is (ServiceState.FAILED if code else ServiceState.RUNNING)
    assert found.pid == 812


def test_only_the_outermost_block_counts() -> None:
    facts = parse_print(PRINTED.format(target="gui/501/x", state="running", last_exit="0") + "\n\t\tstate = other\n")
    assert facts["state"] == "running"
    assert "XPC_SERVICE_NAME" not in facts
    assert parse_print("nonsense") == {}


# -- ownership, list, places


@settings(max_examples=40)
@given(st.text(alphabet="abc\n #<>", max_size=60), st.integers(0, 3))
def test_a_marked_text_is_ours_and_any_change_is_seen(content: str, after: int) -> None:
    content += "\n" * (1 + after)
    text = marked(content, after=after, comment=("# ", ""))
    assert owner_of(text) is Owner.US
    assert owner_of(text + "x") is Owner.CHANGED
    assert owner_of(content) is Owner.OTHERS
    assert owner_of(None) is Owner.NOBODY


def test_the_list_replaces_a_line_and_goes_with_its_last(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "deep/list")
    manifest.record(Entry(kind=Kind.FILE, path=Path("/a b/ü"), sha256="1"))
    manifest.record(Entry(kind=Kind.FILE, path=Path("/a b/ü"), sha256="2"))
    assert [entry.sha256 for entry in manifest.entries()] == ["2"]
    with pytest.raises(StoreError, match="line break"):
        manifest.record(Entry(kind=Kind.TREE, path=Path("/a\nb")))
    manifest.forget(Path("/a b/ü"))
    assert not manifest.path.exists()


def test_lines_of_a_newer_version_and_relative_paths_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("novelty\t/x\ntree\trelative\ntree\t/opt/distensor\n")
    assert [str(entry.path) for entry in Manifest(path).entries()] == ["/opt/distensor"]


def test_places_follow_xdg_and_ignore_relative_values() -> None:
    layout = user_layout({"HOME": "/h", "XDG_STATE_HOME": "/s", "XDG_DATA_HOME": "relative"}, "linux")
    assert (str(layout.state), str(layout.app)) == ("/s/distensor", "/h/.local/share/distensor")
    with pytest.raises(ConfigError, match="HOME"):
        user_layout({}, "linux")


def test_folders_that_only_the_shell_knows_are_written_into_the_unit(tmp_path: Path) -> None:
    """systemd starts a service with its own environment: without them the key would be looked for elsewhere."""
    shell = {"HOME": "/h", "XDG_STATE_HOME": "/s p/100%", "XDG_CONFIG_HOME": "/c", "XDG_DATA_HOME": "/d"}
    layout = user_layout(shell, "linux")
    text = Systemd(layout, Path("/x"), FakeSystemctl()).render()
    assert '\nEnvironment="XDG_STATE_HOME=/s p/100%%"\nEnvironment="XDG_CONFIG_HOME=/c"\n' in text
    assert layout.unit_folder == Path("/h/.config/systemd/user")  # where systemd looks, whatever the shell says
    usual = {"HOME": "/h", "XDG_STATE_HOME": "/h/.local/state", "XDG_CONFIG_HOME": "relative"}
    assert "Environment=" not in Systemd(user_layout(usual, "linux"), Path("/x"), FakeSystemctl()).render()


def test_a_manager_with_its_own_place_for_units_is_asked(tmp_path: Path) -> None:
    shell = {"HOME": "/h", "XDG_CONFIG_HOME": "/c"}
    told = FakeSystemctl(environment="LANG=C\nXDG_CONFIG_HOME=/c\nODD=$'a\\nb'\nnonsense")
    assert cli.chosen_layout(shell, "linux", told, system=False).unit_folder == Path("/c/systemd/user")
    away = FakeSystemctl(reachable=False)
    assert cli.chosen_layout(shell, "linux", away, system=False).unit_folder == Path("/h/.config/systemd/user")
    assert cli.chosen_layout({"HOME": "/h"}, "linux", away, system=False).unit_folder.parent.parent.name == ".config"
    assert away.calls == ["systemctl --user show-environment"]


@needs_systemd
def test_systemd_reads_the_variables_of_the_unit(tmp_path: Path, run: Callable[..., object]) -> None:
    layout = user_layout({"HOME": "/h", "XDG_STATE_HOME": "/s p/100%/$x", "XDG_CONFIG_HOME": "/Müller"}, "linux")
    unit = tmp_path / "distensor.service"
    unit.write_text(Systemd(layout, Path("/bin/true"), FakeSystemctl()).render())
    checked = run(["systemd-analyze", "--user", "verify", unit], env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/"})
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_unit_names_current_where_that_is_what_runs(tmp_path: Path) -> None:
    layout = linux(tmp_path)
    (layout.app / "venv-1").mkdir(parents=True)
    (layout.app / "current").symlink_to("venv-1")
    assert program(layout, layout.app / "venv-1") == layout.app / "current/bin/distensor-server"
    assert program(layout, Path("/elsewhere")) == Path("/elsewhere/bin/distensor-server")


# -- the verb


SCHEMAS = Path(__file__).parents[2] / "docs/schemas"


def answered(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What was printed, in the shape that docs/schemas promises."""
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    error = Resource.from_contents(json.loads((SCHEMAS / "error.json").read_text()))
    registry: Any = Registry().with_resources([("error.json", error)])
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema, registry=registry).validate(value)
    return value


def test_uninstall_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The script itself has its own tests; here is what the command makes of its words and its end."""
    script = tmp_path / "uninstall.sh"
    monkeypatch.setattr(cli, "UNINSTALLER", script)
    script.write_text('echo "would remove $*"; echo "and this"')
    assert cli.uninstall(["--json", "--dry-run", "--purge"]) == 0
    assert answered("uninstall", capsys)["done"] == ["would remove --dry-run --purge", "and this"]
    script.write_text('echo "cannot stop the service"; exit 3')
    assert cli.uninstall(["--json"]) == 69
    assert answered("uninstall", capsys)["error"] == {
        "code": "service",
        "message": "cannot stop the service",
        "fix": "",
    }


def test_status_as_json_and_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ctl = FakeSystemctl()
    monkeypatch.setattr(cli, "run_command", ctl)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["status", "--json"]) == 69
    assert answered("service", capsys)["state"] == "stopped"
    assert cli.main(["install", "--json"]) == 0
    assert answered("service", capsys)["done"][-1] == "started"
    assert cli.main(["status", "--json"]) == 0
    row = answered("service", capsys)
    assert (row["v"], row["ok"], row["state"], row["pid"], row["last_exit"]) == (1, True, "running", 4242, None)
    assert row["last_exit_unavailable"] == "it has not ended yet"
    ctl.active, ctl.last_exit = "failed", 77
    assert cli.main(["status"]) == 69
    assert "last exit 77 (the key" in capsys.readouterr().out
    ctl.refuses["disable"] = "Access denied"
    assert cli.main(["uninstall", "--json"]) == 69
    answer = answered("service", capsys)
    assert (answer["ok"], "Access denied" in answer["error"]["message"]) == (False, True)
    assert "journalctl" in answer["error"]["fix"]


def test_a_system_service_on_macos_is_refused() -> None:
    with pytest.raises(ConfigError, match="agent of the user"):
        cli.chosen_layout({"HOME": "/h"}, "darwin", FakeSystemctl(), system=True)
