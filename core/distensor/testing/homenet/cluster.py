"""A real hub and real supervisors on the hosts of a `HomeNet`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distensor.core.errors import SessionError
from distensor.testing.homenet.net import HomeNet

PORT, RELAY_PORT = 50051, 50052
_STOP_SECONDS = 20.0
_LOG_TAIL = 2000


class HomeCluster:
    """Use as a context manager within that of the network. Logs and state lie in `folder`.

    Args:
        nodes: hosts that run a supervisor each, with `workers` workers on the CPU.
        relay: run a relay on the hub's host, of which the hub tells the members.
        aggregators: by their names, the hosts that run a `distensor aggregator`.
        hub_options, node_options: more of the command line, the nodes' by host.
        environment: more variables for all of them.
    """

    def __init__(
        self,
        net: HomeNet,
        folder: Path,
        *,
        nodes: Sequence[str],
        hub: str = "hub",
        workers: int = 1,
        hub_options: Sequence[str] = (),
        relay: bool = False,
        aggregators: Mapping[str, str] | None = None,
        node_options: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._net, self._folder, self._stack = net, folder, ExitStack()
        self._environment = {**os.environ, **(environment or {})}
        with self._stack:
            there = f"{net.address(hub)}:{RELAY_PORT}"
            told = ("--relay", there) if relay else ()
            services = aggregators or {}
            ready = self._start_hub(hub, len(nodes) + len(services), (*told, *hub_options))
            self.trainer_token = str(ready["trainer_token"])
            if relay:
                self._start_relay(hub, there, ready)
            tokens = iter(ready["node_tokens"])
            for host in nodes:
                self._start_node(host, next(tokens), workers, (node_options or {}).get(host, ()))
            for name, host in services.items():
                self._start_aggregator(host, name, next(tokens))
            self._undo = self._stack.pop_all()

    def _start_hub(self, host: str, tokens: int, options: Sequence[str]) -> dict[str, Any]:
        listen = f"{self._net.address(host)}:{PORT}"
        words = ["distensor", "hub", "--state", str(self._folder / "hub"), "--listen", listen]
        words += ["--node-tokens", str(tokens), "--json", "--exit-with-stdin", *options]
        return self._start(host, "hub", words, "ready", {})

    def _start_relay(self, host: str, listen: str, ready: Mapping[str, Any]) -> None:
        words = ["distensor", "relay", "--listen", listen, "--json", "--exit-with-stdin"]
        words += ["--hub", ready["address"], "--authority", ready["authority_fingerprint"]]
        self._start(host, "relay", words, "ready", {})

    def _start_aggregator(self, host: str, name: str, token: str) -> None:
        words = ["distensor", "aggregator", "--state", str(self._folder / name), "--name", name]
        words += ["--host", self._net.address(host), "--json", "--exit-with-stdin"]
        self._start(host, name, words, "connected", {"DISTENSOR_JOIN_TOKEN": token})

    def _start_node(self, host: str, token: str, workers: int, options: Sequence[str]) -> None:
        state = self._folder / host
        state.mkdir(mode=0o700)
        words = ["distensor_server", "run", "--state", str(state), "--socket", str(state / "s.sock"), "--name", host]
        words += ["--cpu-workers", str(workers), "--json", "--exit-with-stdin"]
        words += [] if "--host" in options else ["--host", self._net.address(host)]
        self._start(host, host, [*words, *options], "connected", {"DISTENSOR_JOIN_TOKEN": token})

    def _start(self, host: str, name: str, words: Sequence[str], event: str, more: Mapping[str, str]) -> dict[str, Any]:
        """Start `python -m words` and wait for its line that has this event."""
        log = self._folder / f"{name}.log"
        with log.open("ab") as stream:
            process = self._net.popen(
                host,
                [sys.executable, "-m", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**self._environment, **more},
            )
        self._stack.callback(_stop, process)
        for line in process.stdout or ():
            said = json.loads(line)
            if said.get("event") == event:
                return dict(said)
        raise SessionError(f"{name} ended before {event!r}; its log ends:\n{log.read_text()[-_LOG_TAIL:]}")

    def close(self) -> None:
        """End the supervisors, then the hub."""
        self._undo.close()

    def __enter__(self) -> HomeCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
