"""What the tests of the supervisor share: a link without a hub, values to assign, and waiting for conditions."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from distensor.comm import LinkError, LinkState, LinkStatus, NodeLinkHandler
from distensor.core.clock import SYSTEM_CLOCK, Clock, SystemClock
from distensor.core.control import (
    Assignment,
    Certificate,
    Member,
    NodeInfo,
    Topology,
    Unit,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.errors import ControlError
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank, WorkerId
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Reading, Unavailable
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery
from distensor.testing.hub_store import MemoryStore
from distensor_server.config import Settings
from distensor_server.devices.answers import Answer
from distensor_server.devices.detect import Detector
from distensor_server.devices.host import Host, HostMemory
from distensor_server.devices.model import Device
from distensor_server.devices.nvidia import cuda_devices
from distensor_server.lifecycle import RestartPolicy
from distensor_server.node import FeatureFactory
from distensor_server.supervisor import FEATURES, StopMode, Supervisor
from distensor_server.surroundings.power import PowerSource
from distensor_server.surroundings.surroundings import Surroundings

FAKE_WORKER = (sys.executable, "-I", "-S", str(Path(__file__).parent / "fake_worker.py"))
GIB = 1 << 30
QUICK = RestartPolicy(first_delay=0.05, longest_delay=0.2, stop_grace=0.5, ready_within=20.0, failures_to_break=3)
NO_GPU = {"error": {"code": 12, "message": "NVML Shared Library Not Found", "hint": "no driver"}}


class NoAccelerators(Detector):
    """A machine without a GPU, found in no time."""

    async def accelerators(self, memory: HostMemory) -> tuple[Device, ...]:
        return cuda_devices(NO_GPU, Unavailable(reason="not asked"), memory)


class OneGpu(Detector):
    """A machine with one GPU that torch can use and that goes on being well."""

    async def accelerators(self, memory: HostMemory) -> tuple[Device, ...]:
        nvml = {"devices": [{"index": 0, "uuid": "GPU-7", "name": "RTX 4090", "memory_total": 24 * GIB}]}
        return cuda_devices(nvml, {"version": "2.13.0", "cuda": True}, memory)

    async def watch(self, family: object, on_answer: Callable[[Answer], None]) -> None:
        await asyncio.get_running_loop().create_future()


class FakeAccount:
    """The hub's books of one node in memory; `failure` is raised instead of an answer."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.node_id = NodeId("n_1")
        self.failure: ControlError | None = None
        self.asked: list[StatementQuery | UnitsQuery] = []

    async def statement(self, query: StatementQuery) -> Statement:
        self._ask(query)
        with self.store.transaction() as books:
            return books.statement(self.node_id, query)

    async def units(self, query: UnitsQuery) -> UnitsPage:
        self._ask(query)
        with self.store.transaction() as books:
            return books.units(self.node_id, query)

    def _ask(self, query: StatementQuery | UnitsQuery) -> None:
        self.asked.append(query)
        if self.failure is not None:
            raise self.failure


async def _no_program(command: Sequence[str]) -> Reading[str]:
    return Unavailable(reason=f"{command[0]}: not in this test")


QUIET = Surroundings(
    platform="linux",
    ask=_no_program,
    read_power=lambda _platform: PowerSource(on_battery=False),
    disk_free=lambda _path: 100 * GIB,
)
"""A machine on mains with room on its disk, whatever the one that runs the tests is."""


class FakeLink:
    """Records what the supervisor says; a test speaks for the hub through `handler`."""

    def __init__(
        self, describe: Callable[[], NodeInfo], running: Callable[[], Sequence[Any]], handler: NodeLinkHandler
    ) -> None:
        self.describe = describe
        self.running = running
        self.handler = handler
        self.reports: list[WorkerReady | WorkerChange] = []
        self.claims: list[Unit] = []
        self.accepting = True
        self.unanswered_claims = 0
        self.woken = 0
        self.account = FakeAccount()
        self.tokens: list[str | None] = []
        self.status = LinkStatus(state=LinkState.CONNECTING, address="hub.example:50051", since=0.0)
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        self.show(LinkState.CONNECTED, node_id=NodeId("n_1"), rtt_ms=1.5)
        raise await self.failure

    def show(self, state: LinkState, **more: Any) -> None:
        self.status = replace(self.status, state=state, since=time.time(), **more)
        self.handler.on_status(self.status)

    def reject(self) -> None:
        error = LinkError(code="token_used", message="the join token was used already", fix="make another")
        self.show(LinkState.REJECTED, error=error, next_retry_at=time.time() + 30)

    def report(self, report: WorkerReady | WorkerChange) -> None:
        self.reports.append(report)

    def claim(self, unit: Unit) -> None:
        self.claims.append(unit)

    def wake(self) -> None:
        self.woken += 1

    def use_token(self, token: str | None) -> None:
        self.tokens.append(token)

    async def statement(self, query: StatementQuery) -> Statement:
        return await self.account.statement(query)

    async def units(self, query: UnitsQuery) -> UnitsPage:
        return await self.account.units(query)

    def set_accepting(self, accepting: bool) -> None:
        self.accepting = accepting

    def states(self, rank: int = 0) -> list[tuple[WorkerState, int]]:
        return [(r.state, r.restarts) for r in self.changes(rank)]

    def changes(self, rank: int = 0) -> list[WorkerChange]:
        return [r for r in self.reports if isinstance(r, WorkerChange) and r.rank == rank]


def assignment(rank: int = 0, *, job: str = "j_1", epoch: int = 1, device: str = "cpu", ranks: int = 2) -> Assignment:
    return Assignment(
        job_id=JobId(job),
        job_name="tiny",
        epoch=Epoch(epoch),
        rank=Rank(rank),
        parallel=ParallelConfig(pipeline_parallel=ranks),
        device_id=DeviceId(device),
        worker_id=WorkerId(f"w_{job}_{epoch}_{rank}"),
    )


def topology(*, job: str = "j_1", epoch: int = 1, ranks: int = 2) -> Topology:
    return Topology(
        job_id=JobId(job),
        job_name="tiny",
        epoch=Epoch(epoch),
        parallel=ParallelConfig(pipeline_parallel=ranks),
        members=tuple(
            Member(
                rank=Rank(r), node_id=NodeId(f"n_{r + 1}"), node_name=f"node-{r + 1}", host="127.0.0.1", port=40000 + r
            )
            for r in range(ranks)
        ),
    )


def certificate(rank: int = 0) -> Certificate:
    return Certificate(rank=Rank(rank), certificate_pem="pem", authority_pem="authority")


async def eventually(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    """The first true value of `condition`; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {what}")


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    """The same for tests without a loop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {what}")


class ShiftedClock(SystemClock):
    """The machine's clocks, each moved by what a test says: it sleeps, or somebody sets the clock."""

    __slots__ = ("monotonic_by", "slept", "wall_by")

    def __init__(self) -> None:
        self.monotonic_by = self.slept = self.wall_by = 0.0

    def now(self) -> float:
        return super().now() + self.monotonic_by + self.slept + self.wall_by

    def monotonic(self) -> float:
        return super().monotonic() + self.monotonic_by

    def since_boot(self) -> float:
        return super().since_boot() + self.monotonic_by + self.slept


@dataclass
class Running:
    """A supervisor in this process, and its link."""

    supervisor: Supervisor
    link: FakeLink
    task: asyncio.Task[None]
    announced: list[dict[str, Any]] = field(default_factory=list)

    async def connected(self) -> None:
        await eventually(lambda: self.link.status.state is LinkState.CONNECTED, "the link is up")

    def assign(self, *ranks: int, **options: Any) -> None:
        for rank in ranks:
            self.link.handler.on_assignment(assignment(rank, **options))

    async def reported(self, state: WorkerState, *, rank: int = 0, restarts: int = 0, seconds: float = 10.0) -> None:
        await eventually(
            lambda: (state, restarts) in self.link.states(rank), f"rank {rank} is {state} ({restarts})", seconds
        )

    def sections(self) -> dict[str, Any]:
        sections: dict[str, Any] = self.supervisor.node.sections()
        json.dumps(sections, allow_nan=False)
        return sections


@asynccontextmanager
async def supervisor_running(
    directory: Path,
    *worker_options: str,
    policy: RestartPolicy = QUICK,
    connect: bool = True,
    may_fail: bool = False,
    may_have_bugs: bool = False,
    environment: Mapping[str, str] | None = None,
    detector: Detector | None = None,
    host: Host | None = None,
    features: Sequence[FeatureFactory] = (),
    all_features: Sequence[FeatureFactory] = FEATURES,
    clock: Clock = SYSTEM_CLOCK,
    surroundings: Surroundings | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A supervisor with fake workers and a fake hub; stopped at the end."""
    links: list[FakeLink] = []

    def make_link(
        credential_path: Path,
        describe: Callable[[], NodeInfo],
        running: Callable[[], Sequence[Any]],
        handler: NodeLinkHandler,
        clock: Clock,
    ) -> FakeLink:
        links.append(FakeLink(describe, running, handler))
        return links[0]

    announced: list[dict[str, Any]] = []
    supervisor = Supervisor(
        settings_in(directory, **settings),
        make_link=make_link,
        worker_command=(*FAKE_WORKER, *worker_options),
        detector=detector or NoAccelerators(),
        host=host,
        policy=policy,
        clock=clock,
        surroundings=surroundings or QUIET,
        environment=environment,
        announce=lambda message: announced.append(dict(message)),
        features=(*all_features, *features),
    )
    running = Running(supervisor, links[0], asyncio.create_task(supervisor.run()), announced)
    try:
        if connect:
            await running.connected()
        yield running
    finally:
        supervisor.stop(StopMode.NOW, "the test is over")
        await asyncio.wait({running.task}, timeout=20)
        assert running.task.done()
        if not may_fail:
            running.task.result()
        assert may_have_bugs or supervisor.node.features.bugs == []


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def state_of(running: Running) -> str:
    word: str = running.sections()["node"]["state"]
    return word


def own_worker(running: Running, rank: int = 0) -> dict[str, Any]:
    return next(w for w in running.sections()["workers"] if w["rank"] == rank)


def events(running: Running) -> list[str]:
    return [event["text"] for event in running.sections()["events"]]


async def start_job(running: Running, *ranks: int) -> None:
    """Until the fake workers have done their steps."""
    running.assign(*ranks)
    for rank in ranks:
        await running.reported(WorkerState.READY, rank=rank)
    running.link.handler.on_topology(topology(), [certificate(rank) for rank in ranks])
    for rank in ranks:
        await running.reported(WorkerState.RUNNING, rank=rank)


def settings_in(directory: Path, **more: Any) -> Settings:
    values: dict[str, Any] = {"overrides": {"cpu_workers": 2}, "name": "atlas-3", **more}
    return Settings(state_dir=directory / "state", socket_path=directory / "s.sock", **values)


class Client:
    """A dashboard: reads lines, sends requests."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(str(path))
        self._file = self._socket.makefile("rb")

    def read(self) -> dict[str, Any] | None:
        line = self._file.readline()
        return json.loads(line) if line else None

    def request(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer; news that comes in between is dropped."""
        self.send_bytes(json.dumps({"type": "request", "id": "7", "method": method, "params": params}).encode() + b"\n")
        while (message := self.read()) is not None:
            if message["type"] == "response":
                return message
        raise AssertionError("closed without an answer")

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class AsyncClient:
    """The same dashboard inside a loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, path: Path) -> AsyncClient:
        return cls(*await asyncio.open_unix_connection(path, limit=1 << 24))

    async def read(self) -> dict[str, Any] | None:
        line = await asyncio.wait_for(self.reader.readline(), 10)
        return json.loads(line) if line else None

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.ask({"type": "request", "id": "7", "method": method, "params": params})

    async def ask(self, message: Any) -> dict[str, Any]:
        return await self.ask_bytes(json.dumps(message).encode() + b"\n")

    async def ask_bytes(self, data: bytes) -> dict[str, Any]:
        self.writer.write(data)
        while (answer := await self.read()) is not None:
            if answer["type"] == "response":
                return answer
        raise AssertionError("closed without an answer")

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
