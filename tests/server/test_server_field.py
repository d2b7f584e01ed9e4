"""Failures that others met in the field, tried here: PRO-03, PRO-05, PRO-08 (PRO-01 is in test_server_death)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from server_fakes import eventually, wait_until
from server_processes import closing, sections, start_command, start_hub

from distensor.comm import LinkState, LinkStatus, NodeLink
from distensor.core.control import NodeInfo
from distensor_server.process import WorkerProcess


class Quiet:
    """A handler of the hub's words that only counts heartbeats."""

    def __init__(self) -> None:
        self.beats = 0

    def on_status(self, status: LinkStatus) -> None:
        self.beats += status.state is LinkState.CONNECTED

    def on_assignment(self, *_given: object) -> None: ...
    def on_topology(self, *_given: object) -> None: ...
    def on_release(self, *_given: object) -> None: ...
    def on_earnings(self, *_given: object) -> None: ...


@pytest.mark.asyncio
async def test_three_hundred_processes_beside_a_living_grpc_link(short_dir: Path) -> None:
    """PRO-05: fork beside grpc's threads deadlocks elsewhere. Here nothing forks: exec through vfork, no preexec_fn."""
    with closing(start_hub(short_dir)) as hub:
        token = hub.line()["node_tokens"][0]
        handler = Quiet()
        info = NodeInfo(name="a", host="127.0.0.1", version="0", devices=())
        link = NodeLink(token, short_dir / "credential.json", lambda: info, list, handler)
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.status.state is LinkState.CONNECTED, "connected")
        codes: list[int] = []
        for batch in range(15):
            for number in range(20):
                link.set_accepting(number % 2 == 0)  # each change is a heartbeat: calls go on while processes start
                await WorkerProcess.start(
                    ["/bin/sh", "-c", "exit 0"],
                    environment={},
                    log_path=short_dir / f"{number}.log",
                    on_line=lambda _line: None,
                    on_end=codes.append,
                )
            await eventually(lambda batch=batch: len(codes) == 20 * (batch + 1), "all have ended")
        beats = handler.beats
        link.set_accepting(False)
        await eventually(lambda: handler.beats > beats, "the link lives")
        assert set(codes) == {0}
        assert link.status.state is LinkState.CONNECTED
        me = psutil.Process()
        assert not [child for child in me.children() if child.status() == psutil.STATUS_ZOMBIE]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _back_since(directory: Path, moment: float) -> bool:
    data = sections(directory)
    return bool(data["node"]["state"] == "IDLE" and data["hub"]["since"] > moment)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_provider_that_is_stopped_for_half_a_minute_is_back_without_a_strike(short_dir: Path) -> None:
    """PRO-08: five times longer than the hub's patience."""
    with closing(start_hub(short_dir)) as hub:
        env = {"DISTENSOR_JOIN_TOKEN": hub.line()["node_tokens"][0]}
        with closing(start_command(short_dir, env=env)) as server:
            assert [server.line()["event"], server.line()["event"]] == ["ready", "connected"]
            for _ in range(5):
                os.kill(server.pid, signal.SIGSTOP)
                time.sleep(30)
                os.kill(server.pid, signal.SIGCONT)
                continued = time.time()
                wait_until(lambda continued=continued: _back_since(short_dir, continued), "connected anew", 10)
            texts = [event["text"] for event in sections(short_dir)["events"]]
            assert any(text.startswith("was stopped for 3") for text in texts)
            told = [event["text"] for event in sections(short_dir)["events"] if event["severity"] != "info"]
            assert not [text for text in told if "offline" in text or "no hub" in text]
            assert sections(short_dir)["node"]["state"] == "IDLE"
            assert server.end() == 0
