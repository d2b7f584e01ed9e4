"""Real processes for the tests of the supervisor: itself, and a hub."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_fakes import FAKE_WORKER, Client, wait_until

HERE = Path(__file__).parent


class Child:
    """A process that announces itself in JSON lines on stdout; its stderr goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log_path = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()}:\n{self.log}"
        value: dict[str, Any] = json.loads(line)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self, *, seconds: float = 20) -> int:
        """SIGTERM, and wait; what is left is killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(seconds)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextmanager
def closing(child: Child) -> Iterator[Child]:
    try:
        yield child
    finally:
        child.close()


def start_hub(directory: Path, *, tokens: int = 1, port: int = 0) -> Child:
    command = [sys.executable, "-m", "distensor", "hub", "--state", str(directory / "hub"), "--json"]
    return Child([*command, "--listen", f"127.0.0.1:{port}", "--node-tokens", str(tokens)], directory / "hub.log")


def start_with_fake_workers(
    directory: Path,
    *worker_options: str,
    token: str | None = None,
    ranks: Sequence[int] = (0, 1),
    name: str = "atlas-3",
) -> Child:
    options = {
        "directory": str(directory),
        "token": token,
        "worker": [*FAKE_WORKER, *worker_options],
        "ranks": list(ranks),
        "name": name,
    }
    child = Child([sys.executable, str(HERE / "supervisor_main.py"), json.dumps(options)], directory / "server.log")
    assert child.line()["event"] == "ready"
    return child


def start_command(directory: Path, *options: str, env: Mapping[str, str] | None = None) -> Child:
    """The command as it is installed."""
    command = [sys.executable, "-m", "distensor_server", "run", "--json", "--name", "atlas-3"]
    command += ["--state", str(directory / "state"), "--socket", str(directory / "s.sock")]
    return Child([*command, *options], directory / "server.log", env)


def sections(directory: Path) -> dict[str, Any]:
    client = Client(directory / "s.sock")
    try:
        data: dict[str, Any] = client.request("snapshot")["result"]["data"]
        return data
    finally:
        client.close()


def worker_pids(directory: Path, state: str, count: int) -> list[int]:
    """The process ids of `count` workers in `state`."""

    def pids() -> list[int]:
        found = [worker["pid"] for worker in sections(directory)["workers"] if worker["state"] == state]
        return found if len(found) == count else []

    result: list[int] = wait_until(pids, f"{count} workers are {state}", 20)
    return result


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
