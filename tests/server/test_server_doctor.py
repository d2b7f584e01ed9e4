"""`distensor doctor`: each check with a planted fault that makes it fail, and a world in which all is well."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distensor.comm.address import parse_address
from distensor.comm.tokens import JoinToken, Role
from distensor.core.control import DeviceKind
from distensor.core.errors import AuthenticationError, HubProtocolError
from distensor.core.ids import DeviceId
from distensor.core.reading import Unavailable
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device
from distensor_server.doctor import checks, machine, network, service, software
from distensor_server.doctor.model import Check, Finding, Level, Said, World, ok, run_child
from distensor_server.doctor.world import this_machine
from distensor_server.keys.chain import KeyStore
from distensor_server.keys.model import FoundKey, KeySource
from distensor_server.keys.ring import KeyRing
from distensor_server.localclient import Snapshot
from distensor_server.service.manager import ServiceState, ServiceStatus
from distensor_server.verbs import doctor

TOKEN = JoinToken(address=parse_address("hub.example:50051"), fingerprint="f" * 64, role=Role.NODE, secret="S" * 32)
KEY = FoundKey(key=TOKEN.encode(), source=KeySource.FILE, where="/etc/key")
RUNNING = Snapshot(hello={"server_version": "1.0", "pid": 7}, sections={"hub": {"state": "connected", "error": None}})
ABSENT = Unavailable(reason="not_running: no supervisor answers")
TORCH = {"version": "2.13.0", "cuda": None, "hip": None, "mps": False, "sees_cuda": False}
CPU = Device(device_id=DeviceId("cpu"), kind=DeviceKind.CPU, name="A CPU", slots=1)
GPU = Device(device_id=DeviceId("gpu0"), kind=DeviceKind.CUDA, name="A GPU", slots=1, unusable="no torch for it")


def status(state: ServiceState, *, enabled: bool = True, last_exit: Any = 0) -> ServiceStatus:
    return ServiceStatus(
        manager="systemd",
        unit=Path("/u"),
        state=state,
        enabled=enabled,
        pid=Unavailable(reason="x"),
        last_exit=last_exit,
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A machine on which all is well."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "proc/sys/fs/inotify").mkdir(parents=True)
    (tmp_path / "proc/sys/fs/inotify/max_user_watches").write_text("65536\n")
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger/ann").touch()
    return World(
        environment={"USER": "ann"},
        platform="linux",
        version="1.0",
        uid=(tmp_path / "state").stat().st_uid or 1,
        state=tmp_path / "state",
        socket=tmp_path / "s.sock",
        host="192.168.1.20",
        root=tmp_path,
        hub=TOKEN.address,
        fingerprint=TOKEN.fingerprint,
        registered=False,
        key=KEY,
        key_problem=None,
        store=KeyStore(tmp_path / "config", KeyRing({}, command=["/nonexistent"])),
        look=lambda: RUNNING,
        wheels={"distensor": "1.0", "distensor-server": "1.0", "distensor-tui": None},
        python=(3, 12, 1),
        bits=64,
        run=lambda words, seconds: Said(code=0, text=f"a warning\n{json.dumps(TORCH)}\n"),
        devices=lambda: [CPU],
        memory=lambda: HostMemory(total=16 << 30, free=8 << 30),
        disk_free=lambda path: 100 << 30,
        open_files=4096,
        resolve=lambda host: ["192.0.2.7"],
        connect=lambda address: 0.02,
        authority=lambda address, fingerprint: "PEM",
        try_key=lambda key: TOKEN,
        bind=lambda host: None,
        service=lambda: status(ServiceState.RUNNING),
    )


def findings(check: Check, world: World) -> list[Finding]:
    found = check(world)
    return [found] if isinstance(found, Finding) else list(found)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def test_a_machine_on_which_all_is_well(world: World) -> None:
    world = replace(world, uid=world.state.stat().st_uid)
    found = checks.examine(world, time.monotonic)
    assert [finding for finding in found if finding.level is not Level.OK] == []
    assert len(found) >= len(checks.STEPS)


SKEWED = Snapshot(hello={}, sections={"hub": {"state": "connected", "clock_skew_s": -90.0}})
RELAYED = Snapshot(
    hello={}, sections={"jobs": [{"links": [{"path": path} for path in ("relay", "lan", "relay", None)]}]}
)
REFUSED = Snapshot(hello={}, sections={"hub": {"state": "rejected", "error": {"message": "spent", "fix": "ask"}}})

FAULTS: Sequence[tuple[Check, dict[str, Any], Level, str, str]] = [
    (software.python, {"python": (3, 10, 9)}, Level.FAIL, "3.10.9 is too old", "Python 3.11"),
    (software.python, {"bits": 32}, Level.FAIL, "32 bits", "64-bit"),
    (software.wheels, {"wheels": {"distensor": "1.0", "distensor-tui": "0.9"}}, Level.FAIL, "differ", "pip install"),
    (software.torch, {"run": lambda w, s: Said(code=None, text="")}, Level.FAIL, "did not start", "disk"),
    (
        software.torch,
        {"run": lambda w, s: Said(code=1, text="ModuleNotFoundError: No module named 'torch'")},
        Level.FAIL,
        "not installed",
        "pip install 'distensor[worker]'",
    ),
    (
        software.torch,
        {"run": lambda w, s: Said(code=1, text="Traceback\nImportError: undefined symbol: x")},
        Level.FAIL,
        "undefined symbol",
        "another Python",
    ),
    (software.torch, {"run": lambda w, s: Said(code=-11, text="")}, Level.FAIL, "signal 11", "--force-reinstall"),
    (software.torch, {"run": lambda w, s: Said(code=0, text="hello")}, Level.FAIL, "'hello'", "reinstall"),
    (software.devices, {"devices": lambda: [GPU]}, Level.WARNING, "no torch for it", "built for this device"),
    (machine.disk, {"disk_free": lambda path: 1 << 20}, Level.FAIL, "0.0 GiB free", "make room"),
    (machine.disk, {"disk_free": lambda path: 1 << 30}, Level.WARNING, "1.0 GiB free", "make room"),
    (machine.memory, {"memory": lambda: HostMemory(total=1 << 28, free=1)}, Level.FAIL, "GiB free", "container"),
    (machine.memory, {"memory": lambda: HostMemory(total=8 << 30, free=1)}, Level.WARNING, "0.0 of 8.0", "other"),
    (machine.files, {"open_files": 256}, Level.WARNING, "256 files open", "ulimit -n"),
    (machine.socket, {"look": lambda: ABSENT}, Level.WARNING, "not running", "service install"),
    (machine.socket, {"socket": Path("/" + "x" * 120)}, Level.FAIL, "too long", "DISTENSOR_SOCKET"),
    (machine.socket, {"version": "2.0"}, Level.WARNING, "of version 1.0; installed is 2.0", "restart"),
    (
        machine.socket,
        {"look": lambda: Unavailable(reason="not_permitted: of another user")},
        Level.FAIL,
        "not_permitted",
        "as the user",
    ),
    (machine.socket, {"look": lambda: Unavailable(reason="silent: nothing")}, Level.FAIL, "silent", "end the process"),
    (network.key, {"key": None}, Level.FAIL, "no key", "distensor auth login"),
    (network.key, {"key_problem": "others can read it"}, Level.FAIL, "others can read", "auth login"),
    (network.hub, {"hub": None}, Level.WARNING, "no hub is known", "auth login"),
    (network.hub, {"resolve": raising(OSError(-2, "unknown name"))}, Level.FAIL, "no address: unknown name", "DNS"),
    (network.hub, {"connect": raising(ConnectionRefusedError(111, "refused"))}, Level.FAIL, "refused", "firewalls"),
    (network.hub, {"connect": lambda address: 3.0}, Level.WARNING, "3000 ms", "slow"),
    (network.hub, {"authority": raising(AuthenticationError("another hub"))}, Level.FAIL, "another hub", "new key"),
    (network.hub, {"authority": raising(HubProtocolError("no TLS"))}, Level.FAIL, "no TLS", "address"),
    (network.hub, {"look": lambda: REFUSED}, Level.FAIL, "spent", "ask"),
    (
        network.hub,
        {"look": lambda: ABSENT, "try_key": raising(AuthenticationError("does not know"))},
        Level.FAIL,
        "does not know",
        "new key",
    ),
    (network.clock, {"look": lambda: SKEWED}, Level.WARNING, "90.0 s ahead of", "timedatectl"),
    (network.peers, {"look": lambda: RELAYED}, Level.WARNING, "1 by lan, 2 by relay", "forward the workers' ports"),
    (network.reachable, {"host": "127.0.0.1"}, Level.WARNING, "cannot reach workers at 127.0.0.1", "--host"),
    (network.reachable, {"bind": raising(OSError(99, "not of this machine"))}, Level.FAIL, "cannot listen", "--host"),
    (service.service, {"service": lambda: status(ServiceState.NOT_INSTALLED)}, Level.WARNING, "not inst", "install"),
    (
        service.service,
        {"service": lambda: status(ServiceState.FAILED, last_exit=77)},
        Level.FAIL,
        "installed but failed: last exit 77 (its key is refused",
        "auth login",
    ),
    (service.service, {"service": lambda: status(ServiceState.STOPPED)}, Level.WARNING, "stopped", "install"),
    (
        service.service,
        {"service": lambda: status(ServiceState.RUNNING, enabled=False)},
        Level.WARNING,
        "does not start by itself",
        "install",
    ),
    (service.linger, {"environment": {"USER": "bob"}}, Level.WARNING, "when you log out", "enable-linger bob"),
]


@pytest.mark.parametrize(("check", "plant", "level", "words", "repair"), FAULTS)
def test_a_planted_fault_is_found_with_its_repair(
    world: World, check: Check, plant: dict[str, Any], level: Level, words: str, repair: str
) -> None:
    found = [finding for finding in findings(check, replace(world, **plant)) if finding.level is not Level.OK]
    assert len(found) == 1
    assert (found[0].level, words in found[0].finding, repair in found[0].fix) == (level, True, True), found[0]


def worst(check: Check, world: World) -> Finding:
    return max(findings(check, world), key=lambda finding: [*Level].index(finding.level))


def test_faults_of_the_state_directory(world: World, tmp_path: Path) -> None:
    world = replace(world, uid=world.state.stat().st_uid)
    assert "will be made" in worst(machine.state, replace(world, state=tmp_path / "new")).finding
    assert "belongs to user" in worst(machine.state, replace(world, uid=world.uid + 1)).finding
    (tmp_path / "file").touch()
    assert "is no directory" in worst(machine.state, replace(world, state=tmp_path / "file")).finding
    assert "cannot be made" in worst(machine.state, replace(world, state=tmp_path / "file" / "state")).finding
    world.state.chmod(0o755)
    assert worst(machine.state, world).fix == f"chmod 700 {world.state}"


def test_faults_of_the_identity(world: World) -> None:
    file = world.state / "credential.json"
    file.write_text("damaged")
    file.chmod(0o644)
    assert worst(machine.identity, world).fix == f"chmod 600 {file}"
    file.chmod(0o600)
    assert "is damaged" in worst(machine.identity, world).finding
    assert worst(machine.identity, replace(world, registered=True)).level is Level.OK


def test_a_socket_that_was_left_behind_or_is_none(world: World, short_dir: Path) -> None:
    path = short_dir / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    gone = replace(world, socket=path, look=lambda: ABSENT)
    assert "left its socket behind" in worst(machine.socket, gone).finding
    path.unlink()
    path.touch()
    assert "is no socket" in worst(machine.socket, gone).finding


def test_few_file_watches(world: World) -> None:
    (world.root / "proc/sys/fs/inotify/max_user_watches").write_text("100\n")
    assert "sysctl" in worst(machine.watches, world).fix


def test_a_card_without_its_driver(world: World) -> None:
    card = world.root / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030000\n")
    assert "driver is not loaded" in worst(software.driver, world).finding
    version = world.root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: 570.1\n")
    assert worst(software.driver, world) == ok("driver", "NVRM version: 570.1")


def test_a_device_file_that_is_not_ours_to_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.root / "dev").mkdir()
    (world.root / "dev/kfd").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert worst(software.driver, world).fix.startswith("sudo usermod -aG render")


# how checks are run


def test_a_check_that_hangs_or_breaks_takes_nobody_elses_answer(world: World) -> None:
    over = threading.Event()

    def hang(_world: World) -> Finding:
        over.wait(30)
        return ok("hang", "late")

    def breaks(_world: World) -> Finding:
        raise RuntimeError(f"with {KEY.key}")

    steps = [
        checks.Step(name="hang", check=hang, limit=0.05),
        checks.Step(name="breaks", check=breaks),
        checks.Step(name="well", check=lambda world: [ok("a", "x"), ok("b", "y")]),
    ]
    found = checks.examine(world, time.monotonic, steps)
    over.set()
    assert [(finding.check, finding.level) for finding in found] == [
        ("hang", Level.FAIL),
        ("breaks", Level.FAIL),
        ("a", Level.OK),
        ("b", Level.OK),
    ]
    assert "no answer within 0.05 s" in found[0].finding
    assert KEY.key not in found[1].finding


def test_a_child_that_is_slow_missing_or_talks() -> None:
    assert run_child(["sleep", "30"], 0.05) == Said(code=None, text="")
    assert run_child(["/nonexistent"], 1).code == 127
    assert run_child(["echo", "x"], 10) == Said(code=0, text="x\n")


# the command


def test_the_answer_as_text_and_json(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [ok("a", "well"), Finding(check="key", level=Level.FAIL, finding="no key", fix="distensor auth login")]
    monkeypatch.setattr(doctor, "this_machine", lambda *_args, **_more: world)
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    assert doctor.main([]) == 69
    shown = capsys.readouterr().out
    assert "FAIL     key  no key" in shown
    assert "-> distensor auth login" in shown
    assert "1 well, 0 warnings, 1 failed" in shown
    assert doctor.main(["--json"]) == 69
    value = json.loads(capsys.readouterr().out)
    assert (value["v"], value["ok"], value["checks"][1]["fix"]) == (1, False, "distensor auth login")
    del found[1]
    assert doctor.main([]) == 0
    assert doctor.main(["--nonsense"]) == 64


def test_the_real_world_is_read_without_a_supervisor(tmp_path: Path) -> None:
    key = tmp_path / ".config/distensor/api_key"
    key.parent.mkdir(parents=True)
    key.write_text(KEY.key)
    key.chmod(0o600)
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    world = this_machine(environment, state=tmp_path / "state", socket_path=tmp_path / "s.sock", host="127.0.0.1")
    assert (world.hub, world.fingerprint, world.registered) == (TOKEN.address, TOKEN.fingerprint, False)
    assert worst(machine.socket, world).finding == "not running"
    assert worst(network.key, world).level is Level.OK
    assert worst(network.reachable, world).level is Level.WARNING
    assert worst(machine.memory, world).finding
    assert KEY.key not in repr(world)
    key.chmod(0o644)
    world = this_machine(environment, state=tmp_path / "state", socket_path=tmp_path / "s.sock", host="127.0.0.1")
    assert "chmod 600" in worst(network.key, world).finding


@pytest.mark.parametrize(
    ("section", "level", "words"),
    [
        (None, Level.OK, "not asked"),
        ({"consent": False, "open": [], "trouble": []}, Level.OK, "not asked"),
        ({"consent": True, "open": [], "trouble": ["no answer"]}, Level.WARNING, "0 open at the router: no answer"),
        ({"consent": True, "open": [], "trouble": []}, Level.WARNING, "nothing is open yet"),
        ({"consent": True, "open": [5, 6], "trouble": [], "external": "9.9.9.9"}, Level.OK, "ports 5 to 6 of 9.9.9.9"),
        ({"consent": True, "open": [5], "trouble": [], "lasting": True}, Level.OK, "keeps them open"),
    ],
)
def test_ports_are_what_the_router_has_opened(world: World, section: object, level: Level, words: str) -> None:
    running = Snapshot(hello={}, sections={} if section is None else {"ports": section})
    found = network.ports(replace(world, look=lambda: running))
    assert (found.level, words in found.finding) == (level, True), found.finding
