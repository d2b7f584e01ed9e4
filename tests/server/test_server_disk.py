"""A full disk and torn files: shown, and nothing stops."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from server_fakes import AsyncClient, events, eventually, own_worker, start_job, state_of, supervisor_running

from distensor.core.control import WorkerState
from distensor_server import logfiles, receipts, statedir
from distensor_server.logfiles import RotatingFile
from distensor_server.ownlog import FileHandler, OwnLog, under_journald
from distensor_server.statedir import StateDirectory, write_json


class Disk:
    """Lets nothing new be written below one directory while it is full."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.full = False

    def check(self, path: Any) -> None:
        if self.full and Path(path).is_relative_to(self.root):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(short_dir)

    class Calls:
        """The functions of `os` that the modules of the state directory write with."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def open(path: Any, flags: int, mode: int = 0o777) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC):
                disk.check(path)
            return os.open(path, flags, mode)

        @staticmethod
        def write(fd: int, data: bytes) -> int:
            disk.check(short_dir)
            return os.write(fd, data)

    class File(FileIO):
        def write(self, data: Any) -> int:
            disk.check(short_dir)
            return super().write(data) or 0

    monkeypatch.setattr(statedir, "os", Calls())
    monkeypatch.setattr(receipts, "os", Calls())
    monkeypatch.setattr(logfiles, "FileIO", File)
    yield disk
    disk.full = False


@pytest.mark.asyncio
async def test_a_disk_that_fills_up_under_work_is_shown_and_the_work_goes_on(short_dir: Path, disk: Disk) -> None:
    async with supervisor_running(short_dir, "--traceback") as running:
        disk.full = True
        await start_job(running, 0)
        await eventually(lambda: len(running.link.claims) == 3, "claimed all the same")
        assert any("cannot write receipts" in text and "No space left" in text for text in events(running))
        (fault,) = running.supervisor.node.sections()["faults"]
        assert (fault["part"], fault["code"]) == ("disk", "disk_full")
        assert "cannot write" in fault["cause"]
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("pause", seconds=60))["ok"]
        assert any("cannot write" in text and "hold.json" in text for text in events(running))
        await eventually(lambda: state_of(running) == "PAUSED", "paused all the same")
        assert (await client.request("resume"))["ok"]
        running.supervisor.tick()
        running.assign(1)
        await running.reported(WorkerState.READY, rank=1)
        os.kill(own_worker(running, 1)["pid"], signal.SIGKILL)
        await running.reported(WorkerState.READY, rank=1, restarts=1)
        disk.full = False
        assert (await client.request("pause"))["ok"]
        await client.close()
    assert (short_dir / "state/hold.json").exists()
    assert (short_dir / "state/snapshot.json").exists()


@pytest.mark.asyncio
async def test_a_supervisor_starts_on_a_full_disk(short_dir: Path, disk: Disk) -> None:
    async with supervisor_running(short_dir):
        pass
    disk.check = lambda path: Disk.check(disk, path) if Path(path).name != "lock" else None  # type: ignore[method-assign]
    disk.full = True
    async with supervisor_running(short_dir) as running:
        assert state_of(running) == "IDLE"
        assert any("cannot write" in text and "workers.json" in text for text in events(running))


@pytest.mark.asyncio
async def test_torn_files_are_set_aside_and_said(short_dir: Path) -> None:
    state = short_dir / "state"
    state.mkdir()
    for name in ("totals.json", "hold.json", "breakers.json", "update.json", "snapshot.json"):
        (state / name).write_text('{"v": 1, "kin')
    (state / "credential.json").write_text("{")
    async with supervisor_running(short_dir) as running:
        assert state_of(running) == "IDLE"
        told = [text for text in events(running) if "was damaged" in text]
        assert len(told) == 5
        assert f"{state}/hold.json was damaged: kept as hold.json.damaged, begun anew" in told
    assert (state / "hold.json.damaged").read_text() == '{"v": 1, "kin'
    assert (state / "credential.json").exists(), "not ours to judge"


def test_whole_files_stay(tmp_path: Path) -> None:
    with StateDirectory(tmp_path) as state:
        write_json(state.hold, {"v": 1})
        assert state.set_aside_damaged() == []
        assert state.hold.exists()


def test_a_log_on_a_full_disk_loses_lines_and_goes_on(short_dir: Path, disk: Disk) -> None:
    with RotatingFile(short_dir / "w.log", max_bytes=20) as log:
        log.write(b"first\n")
        disk.full = True
        log.write(b"lost\n")
        assert log.trouble == "No space left on device"
        log.write(b"lost, and too long for this file\n")
        disk.full = False
        log.write(b"last\n")
        assert log.trouble is None
    kept = "".join(path.read_text() for path in sorted(short_dir.glob("w.log*"), reverse=True))
    assert kept == "first\nlast\n"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in short_dir.glob("w.log*"))


def test_a_log_without_its_directory_is_no_error(tmp_path: Path) -> None:
    with RotatingFile(tmp_path / "none" / "w.log") as log:
        log.write(b"x")
        assert log.trouble == "No such file or directory"


def test_the_own_log_is_bounded_and_takes_any_text(tmp_path: Path) -> None:
    handler = FileHandler(tmp_path / "server.log", max_bytes=300, keep=3)
    for number in range(50):
        record = logging.LogRecord("x", logging.INFO, "f", 1, "line %d \udcff é", (number,), None)
        handler.handle(record)
    handler.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["server.log", "server.log.1", "server.log.2"]
    assert all(path.stat().st_size <= 300 for path in files)
    assert "INFO line 49 \\udcff é" in files[0].read_text("utf-8")


def test_the_journal_is_known_by_the_stream_not_by_the_variable(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        status = os.fstat(file.fileno())
        right = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert under_journald(right, file.fileno())
        assert not under_journald({"JOURNAL_STREAM": "8:1"}, file.fileno())
        assert not under_journald({}, file.fileno())
    assert not under_journald(right, 999)


def test_a_plain_file_as_standard_error_gets_no_more_lines(tmp_path: Path) -> None:
    """Nobody bounds that one."""
    state = StateDirectory(tmp_path)
    node = SimpleNamespace(environment={}, state=state, settings=SimpleNamespace(log_bytes=1000))
    root = logging.getLogger()
    level = root.level
    with (tmp_path / "service.log").open("w") as stderr:
        handler = logging.StreamHandler(stderr)
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            own = OwnLog(cast(Any, node), stderr=stderr.fileno())
            own.open()
            root.info("only in one place")
            own.close()
            root.info("the last words")
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
    assert (tmp_path / "service.log").read_text() == f"the log goes on in {state.own_log}\nthe last words\n"
    assert "only in one place" in state.own_log.read_text()


@pytest.mark.asyncio
async def test_under_the_journal_there_is_no_file(short_dir: Path) -> None:
    status = os.fstat(2)
    systemd = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
    async with supervisor_running(short_dir, environment=systemd):
        pass
    assert not (short_dir / "state/server.log").exists()
