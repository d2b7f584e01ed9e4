"""A hub with thousands of nodes: CPU for each heartbeat, memory, and how soon nodes are back after `kill -9`.

    python benchmarks/hub.py                           1,000, 5,000 and 10,000 streams, then 2,000 nodes and a kill
    python benchmarks/hub.py --nodes 1000 --seconds 10
    python benchmarks/hub.py --database postgresql://... the books in a new, empty PostgreSQL database

The hub is the real one, a process of its own with its books on the disk. Nodes are only words: real gRPC streams over
TLS, each on a connection of its own, which register, beat as often as the hub asks for, and connect again with the
backoff of real nodes; so much of a node that several thousand fit into each of a few processes. What nodes cost is not
counted; on a machine of few cores they compete with the hub for them, which lengthens the time until they are back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from distensor.comm.address import HubAddress, parse_address
from distensor.comm.backoff import Backoff
from distensor.comm.channels import EOF, bearer, open_aio_channel
from distensor.comm.messages import Heartbeat, Register, Welcome
from distensor.comm.stream_codec import read_hub_message, write_node_message
from distensor.core.control import DeviceInfo, DeviceKind, NodeInfo
from distensor.core.ids import DeviceId, NodeId
from distensor.core.reading import Unavailable
from distensor.hub.hashing import hash_secret
from distensor.hub.records import NodeRecord
from distensor.hub.stores.address import parse_database
from distensor.hub.stores.opening import open_store

STREAMS = (1000, 5000, 10_000)
HERD = 2000
PATIENCE = 300.0
UNKNOWN = Unavailable(reason="no real machine")


def secret_of(number: int) -> str:
    return f"{number:043}"


def info_of(number: int) -> NodeInfo:
    device = DeviceInfo(
        device_id=DeviceId("cuda:0"),
        kind=DeviceKind.CUDA,
        name="a card",
        slots=1,
        memory_bytes=24 << 30,
        free_bytes=20 << 30,
        matmul_flops=UNKNOWN,
    )
    node_id = NodeId(f"n_{number}")
    return NodeInfo(name=f"node-{number}", host="127.0.0.1", version="0.1.0", devices=(device,), node_id=node_id)


def raise_descriptors(wanted: int) -> None:
    """Every stream is a descriptor; the soft limit is often a thousand."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < wanted:
        sys.exit(f"hub: {wanted} open files are needed and the hard limit is {hard}; raise it with ulimit -Hn")


# -- nodes -----------------------------------------------------------------------------------------------------------


class Crowd:
    """Nodes in one process."""

    def __init__(self, numbers: range, address: HubAddress, authority_pem: str) -> None:
        self.numbers, self.address, self.authority_pem = numbers, address, authority_pem
        self.here: set[int] = set()
        self.beats = 0
        self._connecting = asyncio.Semaphore(64)

    async def live(self, number: int) -> None:
        backoff = Backoff()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, ConnectionError):
                await self._connect(number, backoff)
            self.here.discard(number)
            await asyncio.sleep(backoff.next_delay())

    async def _connect(self, number: int, backoff: Backoff) -> None:
        async with contextlib.AsyncExitStack() as gate:
            await gate.enter_async_context(self._connecting)
            async with open_aio_channel(self.address, self.authority_pem) as channel:
                call = _stub(channel)(metadata=bearer("node", f"n_{number}", secret_of(number)))
                await call.write(write_node_message(Register(info=info_of(number))))
                welcome = read_hub_message(await call.read())
                if not isinstance(welcome, Welcome):
                    raise ConnectionError(str(welcome))
                await self._beat(call, 1)
                backoff.reset()
                self.here.add(number)
                await gate.aclose()
                await self._stay(call, welcome.heartbeat_seconds)

    async def _stay(self, call: Any, seconds: float) -> None:
        sequence = 1
        while True:
            await asyncio.sleep(seconds)
            sequence += 1
            await self._beat(call, sequence)
            self.beats += 1

    @staticmethod
    async def _beat(call: Any, sequence: int) -> None:
        await call.write(write_node_message(Heartbeat(sequence=sequence)))
        if await call.read() is EOF:
            raise ConnectionError("the stream has ended")


def _stub(channel: grpc.aio.Channel) -> Any:
    from distensor.proto.control_pb2_grpc import ControlStub

    return ControlStub(channel).Node


def crowd_process(numbers: range, address: HubAddress, authority_pem: str, pipe: Connection) -> None:
    """A process full of nodes; answers each question with how many are connected and how often they have beaten."""
    raise_descriptors(len(numbers) + 200)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_crowd(numbers, address, authority_pem, pipe))


async def _crowd(numbers: range, address: HubAddress, authority_pem: str, pipe: Connection) -> None:
    crowd = Crowd(numbers, address, authority_pem)
    tasks = [asyncio.create_task(crowd.live(number)) for number in numbers]
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked.set)
    while True:
        await asked.wait()
        asked.clear()
        try:
            pipe.recv()
        except EOFError:
            break
        pipe.send((len(crowd.here), crowd.beats))
    for task in tasks:
        task.cancel()
    os._exit(0)  # thousands of channels take minutes to be closed one by one


class Nodes:
    """All of them, over several processes."""

    def __init__(self, count: int, processes: int, address: HubAddress, authority_pem: str) -> None:
        self.count = count
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(processes):
            ours, theirs = context.Pipe()
            numbers = range(index * count // processes, (index + 1) * count // processes)
            process = context.Process(target=crowd_process, args=(numbers, address, authority_pem, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self) -> tuple[int, int]:
        """How many are connected, and all heartbeats that were answered."""
        for pipe in self._pipes:
            pipe.send(None)
        answers = [pipe.recv() for pipe in self._pipes]
        return sum(here for here, _ in answers), sum(beats for _, beats in answers)

    def wait(self, wanted: int) -> float:
        """Seconds until so many are connected."""
        start = time.monotonic()
        while (here := self.ask()[0]) < wanted:
            if time.monotonic() - start > PATIENCE:
                sys.exit(f"hub: after {PATIENCE:.0f} s {here} of {wanted} nodes are connected")
            time.sleep(0.1)
        return time.monotonic() - start

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()


# -- the hub ---------------------------------------------------------------------------------------------------------


@dataclass
class Hub:
    state: Path
    database: str | None
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def fill(self, count: int) -> None:
        """Nodes that have joined before: thousands of join tokens would measure only the joining."""
        self.state.mkdir(parents=True, exist_ok=True)
        where = self.state / "hub.sqlite" if self.database is None else parse_database(self.database, os.environ, None)
        with closing(open_store(where)) as store, store.transaction() as books:
            for number in range(count):
                record = NodeRecord(
                    node_id=NodeId(f"n_{number}"), secret_hash=hash_secret(secret_of(number)), info=info_of(number)
                )
                books.save_node(record)

    def start(self) -> float:
        """Start or start again; seconds until it accepts connections."""
        start = time.monotonic()
        words = [
            "hub",
            "--state",
            str(self.state),
            "--listen",
            f"127.0.0.1:{self.port}",
            "--json",
            "--node-tokens",
            "0",
        ]
        words += [] if self.database is None else ["--database", self.database]
        with (self.state / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distensor", *words], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"hub: it has ended: {(self.state / 'log').read_text()[-2000:]}")
        self.address = parse_address(json.loads(line)["address"])
        self.port = self.address.port
        return time.monotonic() - start

    @property
    def authority_pem(self) -> str:
        return (self.state / "authority.pem").read_text()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def used(self) -> tuple[float, int]:
        """Seconds of CPU since its start, and bytes of memory now."""
        assert self.process is not None
        process = psutil.Process(self.process.pid)
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss


def steady(hub: Hub, nodes: Nodes, seconds: float) -> str:
    """One row of the first table."""
    joined = nodes.wait(nodes.count)
    time.sleep(min(seconds, 10.0))  # what the joining left behind
    (_, beats), (cpu, _), start = nodes.ask(), hub.used(), time.monotonic()
    time.sleep(seconds)
    (here, more), (spent, memory), over = nodes.ask(), hub.used(), time.monotonic() - start
    beats, cpu = more - beats, spent - cpu
    each = cpu / beats * 1e6 if beats else float("nan")
    return (
        f"| {nodes.count:,} | {here:,} | {joined:.1f} | {beats / over:,.0f} | {each:.0f} | {cpu / over:.2f} | "
        f"{memory / 1e6:.0f} |"
    )


def run(count: int, options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder) / "state", options.database)
        hub.fill(count)
        hub.start()
        nodes = Nodes(count, options.processes, hub.address, hub.authority_pem)
        try:
            return steady(hub, nodes, options.seconds)
        finally:
            nodes.close()
            hub.end()


def herd(count: int, options: argparse.Namespace) -> str:
    """One row of the second table."""
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder) / "state", options.database)
        hub.fill(count)
        hub.start()
        nodes = Nodes(count, options.processes, hub.address, hub.authority_pem)
        try:
            nodes.wait(count)
            hub.end(signal.SIGKILL)
            while nodes.ask()[0]:
                time.sleep(0.05)
            up = hub.start()
            began = hub.used()[0]
            back = nodes.wait(count)
            return f"| {count:,} | {up:.1f} | {back:.1f} | {began:.1f} | {hub.used()[0] - began:.1f} |"
        finally:
            nodes.close()
            hub.end()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="A hub with thousands of nodes on this machine.")
    parser.add_argument("--nodes", type=int, nargs="*", default=list(STREAMS), metavar="N", help="streams at once")
    parser.add_argument("--herd", type=int, default=HERD, metavar="N", help=f"nodes that come back ({HERD}; 0: none)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each row is measured (30)")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="over which the nodes are spread (4)")
    parser.add_argument("--database", metavar="URL", help="of a PostgreSQL database; default: a SQLite file")
    options = parser.parse_args(argv)
    raise_descriptors(max([0, *options.nodes, options.herd]) + 200)
    if options.nodes:
        print("| nodes | connected | joined in s | heartbeats/s | CPU for each, us | cores | memory, MB |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for count in options.nodes:
        print(run(count, options), flush=True)
    if options.herd:
        print(
            "\n| nodes | hub up after kill -9, s | all nodes back after that, s | CPU of the hub until it is up, s |",
            end="",
        )
        print(" and until all are back, s |\n|---|---|---|---|---|", flush=True)
        print(herd(options.herd, options), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
