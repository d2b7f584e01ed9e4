"""`distensor logs`: events and the log files of supervisor and workers, once and followed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake

from distensor_tui.cli import main
from distensor_tui.commands import logs
from distensor_tui.commands.logs import found_worker, fresh
from distensor_tui.model import Snapshot
from distensor_tui.sections import apply

EVENT = {"at": 1e9, "severity": "info", "source": "hub", "text": "joined"}
FILES = {"w-1": ["loading", "step 1\x1b[31m"], "w-2": ["Traceback", "ValueError: [red]"], None: ["started", "joined"]}
Reply = Callable[[dict[str, Any], int], list[dict[str, Any]]]


def tail_of(request: dict[str, Any], files: Any = FILES) -> dict[str, Any]:
    """What a supervisor answers to log_tail."""
    worker = request["params"].get("worker")
    if worker not in files:
        error = {"code": "no_log", "message": f"there is no {worker}.log", "fix": "a worker's file appears later"}
        return {"type": "response", "id": request["id"], "ok": False, "error": error}
    return {"type": "response", "id": request["id"], "ok": True, "result": {"path": "p", "lines": files[worker]}}


class Supervisor:
    """Answers on a socket by `reply(request, number)`; ends the connection when that gives nothing."""

    def __init__(self, path: Path, reply: Reply, **sections: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self._reply, self._data = reply, fake.snapshot(events=[EVENT], **sections)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as requests:
            self._send(connection, fake.HELLO, {"type": "snapshot", "seq": 1, "data": self._data})
            for line in requests:
                self.asked.append(json.loads(line))
                answers = self._reply(self.asked[-1], len(self.asked))
                if not answers:
                    return
                self._send(connection, *answers)

    @staticmethod
    def _send(connection: socket.socket, *messages: dict[str, Any]) -> None:
        connection.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def serving(path: Path) -> Iterator[Callable[..., Supervisor]]:
    opened: list[Supervisor] = []

    def start(reply: Reply = lambda request, _number: [tail_of(request)], **sections: Any) -> Supervisor:
        opened.append(Supervisor(path, reply, **sections))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_events_and_what_the_workers_print(
    serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving()
    assert main(["logs", "-n", "1", "--socket", str(path)]) == 0
    event, *lines = printed(capsys)
    assert event.endswith(" info     hub        joined")
    assert lines == ["w-1 | step 1␛[31m", "w-2 | ValueError: [red]"]


@pytest.mark.parametrize("name", ["2", "w-2"])
def test_one_worker_alone(
    serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    supervisor = serving()
    assert main(["logs", "--worker", name, "--socket", str(path)]) == 0
    assert printed(capsys) == ["Traceback", "ValueError: [red]"]
    assert [request["params"] for request in supervisor.asked] == [{"lines": 500, "worker": "w-2"}]


def test_the_supervisors_own_file_and_json(
    serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving()
    assert main(["logs", "--supervisor", "-n", "1", "--json", "--socket", str(path)]) == 0
    (line,) = [json.loads(text) for text in printed(capsys)]
    assert line == {"v": 1, "ok": True, "line": {"source": "supervisor", "worker": None, "text": "joined"}}


def test_only_events(serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = serving()
    assert main(["logs", "--events", "--socket", str(path)]) == 0
    assert len(printed(capsys)) == 1
    assert supervisor.asked == []


def test_a_file_that_is_not_there_is_an_error_with_its_fix(
    serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving()
    assert main(["logs", "--worker", "w-9", "--json", "--socket", str(path)]) == 69
    assert json.loads(printed(capsys)[0])["error"] == {
        "code": "no_log",
        "message": "there is no w-9.log",
        "fix": "a worker's file appears later",
    }


def test_a_worker_without_a_file_yet_does_not_hide_the_others(
    serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(workers=[fake.worker(3), fake.worker(2)])
    assert main(["logs", "-n", "1", "--socket", str(path)]) == 0
    assert printed(capsys)[1:] == ["w-2 | ValueError: [red]"]


def test_two_choices_at_once_are_refused(path: Path) -> None:
    assert main(["logs", "--events", "--worker", "1", "--socket", str(path)]) == 64


def test_followed_files_go_on_where_they_were_and_new_workers_join(
    serving: Callable[..., Supervisor],
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds of one worker, of two, and the end, with an event that comes while an answer is waited for."""
    monkeypatch.setattr(logs, "POLL_S", 0.02)
    later = {**EVENT, "text": "assigned"}

    def reply(request: dict[str, Any], number: int) -> list[dict[str, Any]]:
        files = {"w-1": ["a", "b"] if number == 1 else ["b", "c"], "w-2": ["x"]}
        if number == 1:
            sections = {"workers": [fake.worker(1), fake.worker(2)], "events": [EVENT, later]}
            return [{"type": "delta", "seq": 2, "data": sections}, tail_of(request, files)]
        return [tail_of(request, files)] if number < 6 else []

    serving(reply, workers=[fake.worker(1)])
    assert main(["logs", "-f", "--socket", str(path)]) == 69
    shown = [row.split(" | ") if " | " in row else row.split()[-1] for row in printed(capsys)]
    assert shown == ["joined", ["w-1", "a"], ["w-1", "b"], "assigned", ["w-1", "c"], ["w-2", "x"]]


def test_what_came_before_the_end_is_printed(
    serving: Callable[..., Supervisor], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {**EVENT, "text": "stopping"}

    def reply(request: dict[str, Any], number: int) -> list[dict[str, Any]]:
        return [{"type": "delta", "seq": 2, "data": {"events": [EVENT, gone]}}] if number == 1 else []

    serving(reply, workers=[fake.worker(1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distensor_tui.once.WITHIN_S", 0.3)
        assert main(["logs", "--socket", str(path)]) == 69
    assert [row.split()[-1] for row in printed(capsys)] == ["joined", "stopping"]


@pytest.mark.parametrize(
    ("seen", "items", "new"),
    [
        ("", "ab", "ab"),
        ("ab", "ab", ""),
        ("ab", "abc", "c"),
        ("abc", "bcd", "d"),
        ("abc", "xyz", "xyz"),
        ("abab", "abab", ""),
        ("ab", "", ""),
    ],
)
def test_only_what_is_new_is_printed(seen: Sequence[str], items: Sequence[str], new: Sequence[str]) -> None:
    assert "".join(fresh(list(seen), list(items))) == new


def test_a_worker_is_found_by_what_people_type() -> None:
    raw = [fake.worker(1, id="j_22ee-1-1"), fake.worker(2, id="j_22ee-1-2"), fake.worker(2, id="j_33ff-1-2")]
    workers = apply(Snapshot(), {"workers": raw}, full=True).workers or ()
    assert found_worker(workers, "j_22ee-1-1") == "j_22ee-1-1"
    assert found_worker(workers, "1") == "j_22ee-1-1"
    assert found_worker(workers, "j_33") == "j_33ff-1-2"
    assert found_worker(workers, "2") == "2", "two jobs have a rank 2"
    assert found_worker(workers, "j_old-1-0") == "j_old-1-0"
