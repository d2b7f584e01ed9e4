"""`mode="local"`: a real hub and real supervisors as child processes of this one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from distensor.core import Clock
from distensor.core.errors import SessionError

PREFIX = "distensor-"
LOCK = "lock"
YOUNG_SECONDS = 60.0
START_SECONDS = 60.0
STOP_SECONDS = 15.0
LOG_TAIL = 2000


class Child:
    """One process of the local session. It ends when our end of its standard input closes, however we end."""

    def __init__(self, *, name: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log_path = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=dict(env),
                start_new_session=True,  # Ctrl-C is for the trainer, which then stops its children in order
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"stdout-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream: IO[bytes] | None = self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                self._lines.put(line.decode("utf-8", "replace"))
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_for_event(self, event: str, clock: Clock, timeout: float = START_SECONDS) -> dict[str, Any]:
        """The JSON line with this event name.

        Raises:
            SessionError: the process ended first, or the time is over; quotes the end of its log.
        """
        deadline = clock.monotonic() + timeout
        while True:
            remaining = deadline - clock.monotonic()
            try:
                line = self._lines.get(timeout=max(0.0, remaining))
            except queue.Empty:
                raise SessionError(
                    f"{self.name} did not report {event!r} within {timeout:.0f} s{self._log_tail()}"
                ) from None
            if line is None:
                code = self._process.wait()
                raise SessionError(f"{self.name} ended with status {code} before {event!r}{self._log_tail()}")
            data = _object(line)
            if data.get("event") == event:
                return data

    def _log_tail(self) -> str:
        try:
            text = self._log_path.read_text("utf-8", "replace")[-LOG_TAIL:].strip()
        except OSError:
            return ""
        return f"; its log ends:\n{text}" if text else ""

    def ask_to_stop(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._process.stdin.close()

    def terminate(self) -> None:
        if self.running:
            self._process.terminate()

    def reap(self, timeout: float = STOP_SECONDS) -> int:
        """Wait for the end, kill at the end of the time, return the exit status."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.join(timeout)
        return status


@dataclass(slots=True)
class LocalNode:
    """One supervisor of the local session."""

    child: Child
    name: str
    socket: Path
    workers: int


class LocalCluster:
    """A hub and `nodes` supervisors with `workers` CPU workers between them, all on this machine."""

    def __init__(self, *, workers: int, nodes: int, clock: Clock, names: Sequence[str] | None = None) -> None:
        if not 1 <= nodes <= workers:
            raise SessionError(f"workers={workers}, nodes={nodes}: expected at least one worker for each node")
        _require_supervisor()
        self._clock = clock
        self._children: list[Child] = []
        self.nodes: list[LocalNode] = []
        # Short on purpose: the path of a Unix socket has about 100 bytes.
        self.folder, self._lock = make_folder(clock)
        try:
            self._start_hub(nodes)
            names = names or [f"local-{index + 1}" for index in range(nodes)]
            for index, name in enumerate(names):
                share = workers // nodes + (1 if index < workers % nodes else 0)
                self.nodes.append(self._start_node(index, name, share))
            for node in self.nodes:
                node.child.wait_for_event("connected", clock)
        except BaseException:  # an interrupt included: no child may stay behind
            self.close()
            raise

    def _start_hub(self, nodes: int, listen: str = "127.0.0.1:0") -> None:
        arguments = ["-m", "distensor", "hub", "--state", str(self.folder / "hub"), "--listen", listen]
        arguments += ["--node-tokens", str(nodes), "--json", "--exit-with-stdin"]
        self.hub = Child(name="hub", arguments=arguments, env=_plain_env(), log=self.folder / "hub.log")
        self._children.append(self.hub)
        ready = self.hub.wait_for_event("ready", self._clock)
        self.address = str(ready["address"])
        self.trainer_token = str(ready["trainer_token"])
        self._node_tokens = [str(token) for token in ready["node_tokens"]]

    def _start_node(self, index: int, name: str, workers: int, *, again: bool = False) -> LocalNode:
        folder = self.folder / f"n{index + 1}"
        folder.mkdir(mode=0o700, exist_ok=True)
        socket = folder / "s.sock"
        arguments = ["-m", "distensor_server", "run", "--state", str(folder), "--name", name]
        arguments += ["--socket", str(socket), "--cpu-workers", str(workers), "--host", "127.0.0.1"]
        arguments += ["--json", "--exit-with-stdin"]
        env = _plain_env() if again else {**_plain_env(), "DISTENSOR_JOIN_TOKEN": self._node_tokens[index]}
        child = Child(name=f"supervisor {name}", arguments=arguments, env=env, log=self.folder / f"{name}.log")
        self._children.append(child)
        return LocalNode(child=child, name=name, socket=socket, workers=workers)

    def restart_hub(self) -> None:
        """Start the hub again on its old port and state, after it has ended."""
        self._children.remove(self.hub)
        self.hub.ask_to_stop()
        self.hub.reap()
        self._start_hub(0, listen=self.address)

    def restart_node(self, index: int) -> None:
        """Start a supervisor again on its old state, after it has ended."""
        old = self.nodes[index]
        self._children.remove(old.child)
        old.child.ask_to_stop()
        old.child.reap()
        self.nodes[index] = self._start_node(index, old.name, old.workers, again=True)

    def close(self) -> None:
        """Stop supervisors first, then the hub, and remove the folder. Safe to call twice."""
        nodes = [child for child in self._children if child is not getattr(self, "hub", None)]
        self._stop(nodes)
        self._stop([child for child in self._children if child not in nodes])
        self._children.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    @staticmethod
    def _stop(children: Sequence[Child]) -> None:
        actions: tuple[Callable[[Child], object], ...] = (Child.ask_to_stop, Child.terminate, Child.reap)
        for action in actions:
            for child in children:
                action(child)


def make_folder(clock: Clock, parent: Path | None = None) -> tuple[Path, IO[bytes]]:
    """A new folder for a session, and its lock, held until it is closed or this process ends, however it ends.

    Folders of sessions whose process was killed go away here: they hold an authority's key and tokens.
    """
    parent = parent or Path(tempfile.gettempdir())
    for old in parent.glob(f"{PREFIX}*"):
        if _is_left_over(old, clock):
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = (folder / LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _is_left_over(folder: Path, clock: Clock) -> bool:
    """Ours, not brand-new (its owner may not have locked it yet), and nobody holds its lock."""
    try:
        about = folder.lstat()
        if (
            not stat.S_ISDIR(about.st_mode)
            or about.st_uid != os.getuid()
            or clock.now() - about.st_mtime < YOUNG_SECONDS
        ):
            return False
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _plain_env() -> dict[str, str]:
    """Our environment without anybody's secrets for other purposes."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in ("DISTENSOR_API_KEY", "DISTENSOR_JOIN_TOKEN", "DISTENSOR_TOKEN")
    }


def _object(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _require_supervisor() -> None:
    from importlib.util import find_spec

    if find_spec("distensor_server") is None:
        raise SessionError(
            'mode="local" starts real supervisors, and the wheel distensor-server is not installed: '
            "pip install distensor-server"
        )
