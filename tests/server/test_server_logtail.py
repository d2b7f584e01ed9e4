"""The last lines of logs by the local socket: bounded, only of files that are ours to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_fakes import AsyncClient, supervisor_running

from distensor_server.logtail import LONGEST_LINE, MOST_BYTES, tail


def test_the_last_lines_and_whether_there_were_more(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"one\ntwo\xff\nthree")
    assert tail(path, 2) == (["two\ufffd", "three"], True)
    assert tail(path, 3) == (["one", "two\ufffd", "three"], False)


def test_a_large_file_is_read_from_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(MOST_BYTES // 4)))
    lines, more = tail(path, 500)
    assert lines[-1] == f"{MOST_BYTES // 4 - 1:07d}"
    assert len(lines) == 500
    assert more


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * 5000)
    assert tail(path, 1) == (["x" * LONGEST_LINE], False)


async def ask(path: Path, **params: Any) -> dict[str, Any]:
    client = await AsyncClient.connect(path)
    try:
        return await client.request("log_tail", **params)
    finally:
        await client.close()


@pytest.mark.asyncio
async def test_a_worker_s_log_and_the_supervisor_s_own(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        state, path = running.supervisor.node.state, running.supervisor.node.settings.socket_path
        (state.logs / "job-1_r0.log").write_text("loading\nTraceback\n")
        assert (await ask(path, worker="job-1/r0"))["result"] == {
            "path": str(state.logs / "job-1_r0.log"),
            "lines": ["loading", "Traceback"],
            "more": False,
        }
        assert (await ask(path, worker="../../etc/passwd"))["error"]["code"] == "no_log"
        assert (await ask(path, lines=5))["result"]["path"] == str(state.own_log)


@pytest.mark.asyncio
@pytest.mark.parametrize("params", [{"lines": 0}, {"lines": 501}, {"lines": True}, {"worker": 3}, {"file": "/etc"}])
async def test_what_it_does_not_take_is_refused(short_dir: Path, params: dict[str, Any]) -> None:
    async with supervisor_running(short_dir) as running:
        answer = await ask(running.supervisor.node.settings.socket_path, **params)
        assert answer["error"]["code"] == "bad_params"
