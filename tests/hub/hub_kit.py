"""A real hub process and nodes whose workers are only words; shared by the tests of comm and hub."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distensor.comm import LinkState, LinkStatus, NodeLink, new_key_and_csr
from distensor.comm.backoff import Backoff
from distensor.core.control import (
    Assignment,
    Certificate,
    DeviceInfo,
    DeviceKind,
    Earnings,
    JobSpec,
    NodeInfo,
    Topology,
    WorkerReady,
)
from distensor.core.ids import DRIVER_RANK, DeviceId, Epoch, JobId, Rank
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Unavailable

UNKNOWN = Unavailable(reason="not measured in this test")


def cpu(slots: int = 2, device_id: str = "cpu") -> DeviceInfo:
    return DeviceInfo(
        device_id=DeviceId(device_id),
        kind=DeviceKind.CPU,
        name="test CPU",
        slots=slots,
        memory_bytes=UNKNOWN,
        free_bytes=UNKNOWN,
    )


def info(name: str, slots: int = 2) -> NodeInfo:
    return NodeInfo(name=name, host="127.0.0.1", version="0.1.0", devices=(cpu(slots),))


def spec(dp: int = 1, pp: int = 1, *, submission: str = "s1", name: str = "job", csr: str | None = None) -> JobSpec:
    if csr is None:
        csr = new_key_and_csr(JobId("j_new"), None, DRIVER_RANK)[1]
    parallel = ParallelConfig(data_parallel=dp, pipeline_parallel=pp)
    return JobSpec(submission=submission, name=name, parallel=parallel, csr_pem=csr)


class HubProcess:
    """`python -m distensor hub` as a child."""

    def __init__(
        self,
        state: Path,
        *,
        port: int = 0,
        tokens: int = 0,
        env: dict[str, str] | None = None,
        clock_file: Path | None = None,
    ) -> None:
        self.state = state
        self._env = env
        self._clock_file = clock_file
        command = [sys.executable, "-m", "distensor", "hub", "--state", str(state), "--json"]
        command += ["--listen", f"127.0.0.1:{port}", "--node-tokens", str(tokens), "--exit-with-stdin"]
        if clock_file is not None:
            main = Path(__file__).with_name("hub_clock_main.py")
            command = [sys.executable, str(main), str(state), f"127.0.0.1:{port}", str(tokens), str(clock_file)]
        with (state.parent / f"{state.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(env or {})},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the hub ended with {self.process.wait()}: {self.log()}"
        self.ready = json.loads(line)

    @property
    def port(self) -> int:
        return int(self.ready["address"].rpartition(":")[2])

    def log(self) -> str:
        return (self.state.parent / f"{self.state.name}.log").read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self._reap()

    def _reap(self) -> int:
        code = self.process.wait(timeout=20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def restart(self, tokens: int = 0) -> HubProcess:
        """A new process on the same state and port."""
        return HubProcess(self.state, port=self.port, tokens=tokens, env=self._env, clock_file=self._clock_file)


@dataclass
class WordNode:
    """A node that answers each assignment with `ready` at once."""

    name: str
    token: str | None
    credential: Path
    slots: int = 2
    answers: bool = True
    statuses: list[LinkStatus] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    topologies: list[tuple[Topology, Sequence[Certificate]]] = field(default_factory=list)
    releases: list[tuple[JobId, Epoch, str]] = field(default_factory=list)
    earnings: Earnings = field(default_factory=Earnings)
    held: set[tuple[JobId, Epoch, Rank]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.link = NodeLink(
            self.token,
            self.credential,
            lambda: info(self.name, self.slots),
            lambda: sorted(self.held),
            self,
            backoff=Backoff(cap=0.4),
        )

    def on_status(self, status: LinkStatus) -> None:
        self.statuses.append(status)

    def on_assignment(self, assignment: Assignment) -> None:
        self.assignments.append(assignment)
        ref = (assignment.job_id, assignment.epoch, assignment.rank)
        self.held.add(ref)
        if self.answers:
            self.link.report(ready_for(*ref))

    def on_topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        self.topologies.append((topology, certificates))

    def on_release(self, job_id: JobId, epoch: Epoch, reason: str) -> None:
        self.releases.append((job_id, epoch, reason))
        self.held = {ref for ref in self.held if ref[:2] != (job_id, epoch)}

    def on_earnings(self, earnings: Earnings) -> None:
        self.earnings = earnings

    @property
    def connected(self) -> bool:
        return self.link.status.state is LinkState.CONNECTED


def ready_for(job_id: JobId, epoch: Epoch, rank: Rank, port: int = 0) -> WorkerReady:
    csr = new_key_and_csr(job_id, epoch, rank)[1]
    return WorkerReady(job_id=job_id, epoch=epoch, rank=rank, port=port or 40_000 + rank, csr_pem=csr)


async def until(condition: Callable[[], object], *, seconds: float = 15.0, what: str = "") -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or condition}"
        await asyncio.sleep(0.01)
