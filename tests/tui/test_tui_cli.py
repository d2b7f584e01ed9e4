"""The command line: what it prints and with which code it ends."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake

from distensor_tui import __version__, verbs
from distensor_tui.arguments import duration, place_of_verb, size
from distensor_tui.cli import main
from distensor_tui.clock import local
from distensor_tui.paths import socket_path
from distensor_tui.tty import fit_for_dashboard


class ServerThread:
    """A fake supervisor in a thread of its own, for commands that block."""

    def __init__(self, path: Path, data: dict[str, Any], hello: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.fake = self._run(self._start(path, data, hello))

    async def _start(self, path: Path, data: dict[str, Any], hello: dict[str, Any]) -> fake.FakeSupervisor:
        server = fake.FakeSupervisor(path, data, hello)
        await server.start()
        return server

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        self._run(self.fake.stop())
        self._run(self._settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _settle(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 5)


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


@pytest.fixture
def server(path: Path) -> Iterator[fake.FakeSupervisor]:
    thread = ServerThread(path, fake.snapshot(), fake.HELLO)
    yield thread.fake
    thread.close()


def test_status_says_the_facts(server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", str(path)]) == 0
    shown = capsys.readouterr().out
    for fact in ("EARNING", "connected to hub.example.net:50051", "llama-1b", "gpu0", "1.840 credits", "SIGKILL"):
        assert fact in shown, fact


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        ("status", {"node", "hub", "devices", "workers", "jobs", "earnings", "faults", "unavailable"}),
        ("why", {"node"}),
        ("devices", {"devices"}),
        ("jobs", {"jobs", "workers"}),
        ("earnings", {"earnings", "income"}),
    ],
)
def test_json_is_one_line_of_version_1(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str], verb: str, keys: set[str]
) -> None:
    assert main([verb, "--json", "--socket", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line)
    assert value["v"] == 1
    assert value["ok"] is True
    assert value.keys() - {"v", "ok", "server_version"} == keys


@pytest.mark.parametrize("verb", ["why", "devices", "jobs", "earnings"])
def test_each_verb_has_a_text(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main(["--socket", str(path), verb]) == 0
    expected = {"why": "user pause: not paused", "devices": "RTX 4090", "jobs": "rank 2", "earnings": "3,086 units"}
    assert expected[verb] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "method", "params"),
    [
        (["pause"], "pause", {}),
        (["pause", "--for", "2h"], "pause", {"seconds": 7200}),
        (["resume"], "resume", {}),
        (["retry"], "reset_breaker", {}),
        (["retry", "w-17"], "reset_breaker", {"worker": "w-17"}),
        (["drain", "--json"], "drain", {}),
    ],
)
def test_orders_are_sent(
    server: fake.FakeSupervisor, path: Path, words: list[str], method: str, params: dict[str, int]
) -> None:
    assert main([*words, "--socket", str(path)]) == 0
    assert [(r["method"], r["params"]) for r in server.requests] == [(method, params)]


def test_a_pause_until_a_time_says_when_it_ends(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.respond = lambda request: {"ok": True, "result": {"until": request["params"]["until"]}}
    assert main(["pause", "--until", "18:00", "--socket", str(path)]) == 0
    until = server.requests[0]["params"]["until"]
    assert isinstance(until, float)
    assert local(until, None).strftime("%H:%M:%S") == "18:00:00"
    assert f"paused until {local(until, None):%Y-%m-%d} 18:00: this node takes no work" in capsys.readouterr().out
    for wrong in (["--until", "2h"], ["--until", "25:00"], ["--until", "18:00", "--for", "2h"]):
        assert main(["pause", *wrong, "--socket", str(path)]) == 64


@pytest.mark.parametrize(("names", "words"), [(["w-1", "w-2"], "started again: w-1, w-2"), ([], "no worker is broken")])
def test_retry_says_which_workers_it_started(
    server: fake.FakeSupervisor,
    path: Path,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    words: str,
) -> None:
    server.respond = lambda _request: {"ok": True, "result": {"reset": names}}
    assert main(["retry", "--socket", str(path)]) == 0
    assert capsys.readouterr().out == f"{words}\n"


def test_logs_are_one_a_line_without_control_characters(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"at": 1e9, "severity": "info", "source": "hub", "text": text} for text in ("a", "two\nlines\x1b[31m")]
    server.data["events"] = rows
    assert main(["logs", "-n", "1", "--socket", str(path)]) == 0
    assert capsys.readouterr().out.endswith(" info     hub        two lines␛[31m\n")
    assert main(["logs", "--json", "--socket", str(path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"v": 1, "ok": True, "event": row} for row in rows]


def test_followed_logs_end_with_the_supervisor(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = ({"at": 1e9, "severity": "info", "source": "hub", "text": text} for text in ("old", "new"))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for message in (
                fake.HELLO,
                {"type": "snapshot", "seq": 1, "data": fake.snapshot(events=[old])},
                {"type": "delta", "seq": 2, "data": {"events": [old, new]}},
            ):
                connection.sendall(json.dumps({"type": "hello", **message}).encode() + b"\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        thread = threading.Thread(target=serve)
        thread.start()
        assert main(["logs", "-f", "--json", "--socket", str(path)]) == 69
        thread.join()
    events = [json.loads(line).get("event") for line in capsys.readouterr().out.splitlines()]
    assert events == [old, new, None]


def test_a_refused_order_ends_with_69_and_says_why(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.respond = lambda request: {"ok": False, "error": {"code": "c", "message": "not now", "fix": "later"}}
    assert main(["pause", "--socket", str(path)]) == 69
    assert "pause failed: not now\n  later" in capsys.readouterr().err
    assert main(["pause", "--json", "--socket", str(path)]) == 69
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "not now"


def test_no_supervisor_is_69_with_the_fix(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", str(path)]) == 69
    shown = capsys.readouterr().err
    assert "not running" in shown
    assert "distensor-server run" in shown


def test_no_supervisor_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--socket", str(path)]) == 69
    value = json.loads(capsys.readouterr().out)
    assert (value["v"], value["ok"], value["error"]["code"]) == (1, False, "not_running")
    assert "distensor-server run" in value["error"]["fix"]


def test_another_version_is_76(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    thread = ServerThread(path, fake.snapshot(), {**fake.HELLO, "schema_version": 9})
    assert main(["status", "--socket", str(path)]) == 76
    thread.close()
    assert "schema 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sends", "code"), [(b"220 mail ESMTP\r\n", 76), (b"x", 76), (b"", 69), (b'{"type":"response"}\n', 76)]
)
def test_something_else_on_the_socket(path: Path, sends: bytes, code: int) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(sends)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["status", "--socket", str(path)]) == code
        thread.join()


def test_a_long_path_is_78(tmp_path: Path) -> None:
    assert main(["status", "--socket", str(tmp_path / ("x" * 120))]) == 78


def test_a_file_is_76(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert main(["status", "--socket", str(tmp_path / "f")]) == 76


@pytest.mark.parametrize(
    "words", [["status", "--nonsense"], ["pause", "--for", "soon"], ["--size", "big"], ["--screen", "9"]]
)
def test_wrong_usage_is_64(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 64
    said = capsys.readouterr().err
    assert "usage: distensor" in said
    assert "(usage, exit 64)" in said


def test_wrong_usage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--nonsense", "--json"]) == 64
    value = json.loads(capsys.readouterr().out)
    assert (value["v"], value["ok"], value["error"]["code"]) == (1, False, "usage")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"distensor {__version__}\n"


def run(words: Sequence[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "distensor_tui", *words],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "TERM": "xterm", **environ},
        check=False,
    )


def test_without_a_terminal_the_dashboard_is_text_and_exit_0(server: fake.FakeSupervisor, path: Path) -> None:
    found = run([], DISTENSOR_SOCKET=str(path))
    assert (found.returncode, found.stderr) == (0, "")
    assert "EARNING" in found.stdout


def test_without_a_terminal_and_supervisor_it_is_text_and_exit_0(path: Path) -> None:
    found = run(["--socket", str(path)])
    assert (found.returncode, found.stderr) == (0, "")
    assert "not running" in found.stdout


def test_a_reader_that_leaves_is_no_error(server: fake.FakeSupervisor, path: Path) -> None:
    command = f"{sys.executable} -m distensor_tui status --socket {path} | true"
    found = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, b"")


def test_foreign_bytes_survive_an_ascii_output(path: Path) -> None:
    thread = ServerThread(path, fake.snapshot(node=fake.node(name="ätlas")), fake.HELLO)
    found = run(["status", "--socket", str(path)], PYTHONIOENCODING="ascii")
    thread.close()
    assert found.returncode == 0
    assert "?tlas" in found.stdout


# commands of other wheels


def echo(arguments: list[str]) -> int:
    sys.stdout.write("|".join(arguments))
    return 7


def entry(value: str) -> EntryPoint:
    return EntryPoint(name="hub", value=value, group=verbs.GROUP)


def test_another_wheels_verb_gets_the_rest_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run("hub", ["--listen", "[red]"], lambda verb: entry(f"{__name__}:echo")) == 7
    assert capsys.readouterr().out == "--listen|[red]"


@pytest.mark.parametrize(
    ("verb", "wheel"),
    [("hub", "distensor"), ("demo", "distensor[worker]"), ("cloud", "distensor[cloud]"), ("auth", "distensor-server")],
)
def test_a_missing_wheel_is_named(verb: str, wheel: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run(verb, [], lambda verb: None, lambda wheel: None) == 69
    assert f"pip install '{wheel}'" in capsys.readouterr().err


def test_a_command_that_the_installed_wheel_lacks_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run("cloud", ["--json"], lambda verb: None, lambda wheel: "0.0.9") == 69
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "'cloud' is not part of distensor[cloud] 0.0.9, which is installed"


def test_the_version_of_a_wheel() -> None:
    assert verbs.version_of("distensor[cloud]") == __version__
    assert verbs.version_of("no-such-wheel-of-ours") is None


def test_a_broken_wheel_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.run("hub", [], lambda verb: entry("no_such_package_of_ours:main")) == 69
    assert "no_such_package_of_ours" in capsys.readouterr().err


def test_an_unknown_verb_is_64_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statsu"]) == 64
    assert "did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["hub", "--json"], 0),
        (["--socket", "x", "hub"], 2),
        (["--socket", "hub", "status"], 2),
        (["status", "hub"], 0),
        (["--demo"], None),
        ([], None),
    ],
)
def test_where_the_command_stands(words: list[str], place: int | None) -> None:
    assert place_of_verb(words) == place


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400)])
def test_durations(text: str, seconds: int) -> None:
    assert duration(text) == seconds


def test_sizes() -> None:
    assert size("120x40") == (120, 40)


# where the socket is


@pytest.mark.parametrize(
    ("chosen", "environ", "platform", "expected"),
    [
        ("/a/b.sock", {"DISTENSOR_SOCKET": "/c"}, "linux", "/a/b.sock"),
        (None, {"DISTENSOR_SOCKET": "/c"}, "linux", "/c"),
    ],
)
def test_the_option_wins_over_the_environment(
    chosen: str | None, environ: dict[str, str], platform: str, expected: str
) -> None:
    assert socket_path(chosen, environ, platform) == Path(expected)


def test_the_runtime_directory_is_used_where_it_has_our_folder(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert not socket_path(None, environ, "linux").is_relative_to(tmp_path)
    (tmp_path / "distensor").mkdir()
    assert socket_path(None, environ, "linux") == tmp_path / "distensor" / "supervisor.sock"
    assert not socket_path(None, environ, "darwin").is_relative_to(tmp_path)


def test_root_sees_the_machines_service_where_it_has_none_of_its_own(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    (tmp_path / "run/distensor").mkdir(parents=True)
    system, own = tmp_path / "system.sock", tmp_path / "run/distensor/supervisor.sock"
    assert socket_path(None, environ, "linux", system) == own  # others may not even look whether it is there
    system.touch()
    assert socket_path(None, environ, "linux", system) == system
    own.touch()
    assert socket_path(None, environ, "linux", system) == own
    assert socket_path("/chosen", environ, "linux", system) == Path("/chosen")


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_terminals_that_cannot_be_drawn_on(term: str) -> None:
    assert not fit_for_dashboard({"TERM": term}, ())


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert not fit_for_dashboard({"TERM": "xterm"}, (stream,))


def test_all_that_is_known_of_one_device(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", "gpu0", "--socket", str(path)]) == 0
    assert "power          318 W (limit 450 W)" in capsys.readouterr().out
    assert main(["devices", "gpu0", "--json", "--socket", str(path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["devices"]
    assert row["id"] == "gpu0"
    assert main(["devices", "tpu", "--socket", str(path)]) == 69
    assert "devices: gpu0, cpu" in capsys.readouterr().err


def test_a_benchmark_is_waited_for(server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(request: dict[str, Any]) -> dict[str, Any]:
        rows = [
            {**row, "benchmark": {"at": fake.NOW, "stale": False, "memory_p10": 8e9, "memory_p50": 9e9}}
            for row in server.data["devices"]
        ]
        asyncio.get_running_loop().call_soon(lambda: server.push(earnings=fake.earnings()))
        asyncio.get_running_loop().call_soon(lambda: server.push(devices=rows))
        return {"ok": True, "result": {"devices": ["gpu0", "cpu"]}}

    server.respond = measure
    assert main(["devices", "--benchmark", "--socket", str(path)]) == 0
    assert capsys.readouterr().out.count("9 GB/s (at least 8 GB/s in 9 of 10 runs)") == 2
    assert server.requests[-1]["params"] == {}


def test_a_benchmark_beside_a_worker_is_refused_with_the_reason(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"code": "busy", "message": "a worker runs", "fix": "ask again when no job runs"}
    server.respond = lambda _request: {"ok": False, "error": error}
    assert main(["devices", "cpu", "--benchmark", "--socket", str(path)]) == 69
    assert "ask again when no job runs" in capsys.readouterr().err
    assert server.requests[-1]["params"] == {"device": "cpu"}
