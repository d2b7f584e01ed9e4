"""Raw TCP, raw TLS 1.3, gloo and our data plane over loopback, 1 KB to 64 MB, as markdown tables.

Two processes, one machine. Throughput: messages of a size one way, back to back, until the last one is acknowledged, in
MB/s. Round trips: a message there and one back, in microseconds. All-reduce: a float32 tensor of that size in two
processes, MB/s of its bytes. `local` is the data plane between processes of one user on one machine, which leaves TLS.

All columns of a row are taken in turns, so that they see the same machine; a figure is the best of the rounds, and the
ratio of ours to raw TLS of the same Python is the median of the ratios within a round. The bar is 0.9 from 64 KB up.

    python benchmarks/transport.py [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from distensor.comm.identity import new_key_and_csr
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.ids import Epoch, JobId, Rank
from distensor.hub.pki import Authority
from distensor.transport import (
    Address,
    Channel,
    Credentials,
    DataPlane,
    Listener,
    LocalMeeting,
    PeerId,
    SendHandle,
    Tag,
)
from distensor.transport.group import TransportGroup
from distensor.transport.identity import client_context, server_context

JOB, EPOCH = JobId("j_benchmark"), Epoch(1)
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
ROUNDS = 7
SMALL = (1 << 6, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
BAR, BAR_FROM = 0.9, 1 << 16
OURS, THEIRS = "distensor (TLS)", "raw TLS 1.3"

Exchange = Callable[[int, int], None]
"""Called with (size, repetitions) in both processes."""
Rounds = Sequence[Mapping[str, float]]
"""Seconds of one repetition of each, round by round."""


def credentials(authority: Authority, rank: int) -> Credentials:
    key, request = new_key_and_csr(JOB, EPOCH, Rank(rank))
    certificate = authority.sign(request, JOB, EPOCH, Rank(rank))
    return Credentials(key_pem=key, certificate_pem=certificate, authority_pem=authority.authority_pem)


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.recv_into(view) :]


Talk = tuple[Callable[[Any], None], Callable[[int], None], Callable[[], None]]
"""How to send a message, how to take one of a size, and how to wait until all that was sent has left."""


def over_socket(connection: socket.socket) -> Talk:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rooms: dict[int, memoryview] = {}

    def take(size: int) -> None:
        receive_exactly(connection, rooms.setdefault(size, memoryview(bytearray(size))))

    return connection.sendall, take, lambda: None


def over_gloo(rank: int) -> Talk:
    rooms: dict[int, torch.Tensor] = {}

    def send(data: bytearray) -> None:
        dist.send(torch.frombuffer(data, dtype=torch.uint8), 1 - rank)

    def take(size: int) -> None:
        dist.recv(rooms.setdefault(size, torch.zeros(size, dtype=torch.uint8)), 1 - rank)

    return send, take, lambda: None


def over_plane(plane: DataPlane, rank: int) -> Talk:
    handles: list[SendHandle] = []

    def send(data: bytearray) -> None:
        handles.append(plane.send(1 - rank, Tag(Channel.P2P), b"", [data]))

    def flush() -> None:
        for handle in handles:
            handle.wait(60)
        handles.clear()

    def take(size: int) -> None:
        assert len(plane.recv(1 - rank, Tag(Channel.P2P), 60).body) == size

    return send, take, flush


def there_and_back(talk: Talk, rank: int) -> Exchange:
    send, take, flush = talk

    def run(size: int, repetitions: int) -> None:
        data = bytearray(size)
        for _ in range(repetitions):
            if rank == 0:
                send(data)
            take(size)
            if rank == 1:
                send(data)
        flush()

    return run


def one_way(talk: Talk, rank: int) -> Exchange:
    send, take, flush = talk

    def run(size: int, repetitions: int) -> None:
        data = bytearray(size)
        for _ in range(repetitions):
            if rank == 0:
                send(data)
            else:
                take(size)
        if rank == 0:
            flush()
            take(1)
        else:
            send(bytearray(1))
            flush()

    return run


def all_reduces(group: Any) -> Exchange:
    options = AllreduceOptions()
    options.asyncOp = False

    def run(size: int, repetitions: int) -> None:
        data = torch.ones(size // 4)
        for _ in range(repetitions):
            group.allreduce([data], options).wait()

    return run


def in_turns(runs: Mapping[str, Exchange], size: int, budget: int) -> Rounds:
    """Each run in each round, so that all see the same machine."""
    repetitions = max(2, min(300, budget // size))
    rounds = []
    for _ in range(ROUNDS):
        seconds = {}
        for name, run in runs.items():
            run(size, 1)
            start = time.perf_counter()
            run(size, repetitions)
            seconds[name] = (time.perf_counter() - start) / repetitions
        rounds.append(seconds)
    return rounds


def measure(pipe: Connection, rank: int, own: Credentials, quick: bool) -> None:
    torch.set_num_threads(1)
    sizes, budget = (SIZES[:5], 1 << 23) if quick else (SIZES, 1 << 26)
    raw, secured = meet(pipe, rank), secure(meet(pipe, rank), rank, own)
    dist.init_process_group("gloo", store=pipe_store(pipe, rank), rank=rank, world_size=2)
    with open_plane(pipe, rank, own) as plane, open_plane(pipe, rank, own, local=True) as near:
        ours = TransportGroup(plane, (0, 1), rank, name="benchmark", timeout=600.0, clock=SYSTEM_CLOCK)
        talks = {
            "raw TCP": over_socket(raw),
            THEIRS: over_socket(secured),
            "gloo": over_gloo(rank),
            OURS: over_plane(plane, rank),
            "distensor (local)": over_plane(near, rank),
        }
        streams = {name: one_way(talk, rank) for name, talk in talks.items()}
        trips = {name: there_and_back(talk, rank) for name, talk in talks.items()}
        sums = {"gloo": all_reduces(dist.group.WORLD), OURS: all_reduces(ours)}
        found = [
            {size: in_turns(runs, size, budget) for size in of}
            for runs, of in ((streams, sizes), (trips, SMALL), (sums, sizes))
        ]
        ours.shutdown()
    dist.destroy_process_group()
    if rank == 0:
        report(*found)


def secure(raw: socket.socket, rank: int, own: Credentials) -> ssl.SSLSocket:
    if rank == 0:
        return server_context(own).wrap_socket(raw, server_side=True)
    return client_context(own).wrap_socket(raw)


def meet(pipe: Connection, rank: int) -> socket.socket:
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname())
            return listener.accept()[0]
    return socket.create_connection(pipe.recv())


def pipe_store(pipe: Connection, rank: int) -> dist.Store:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
        return store
    return dist.TCPStore("127.0.0.1", pipe.recv(), 2, is_master=False)


def open_plane(pipe: Connection, rank: int, own: Credentials, *, local: bool = False) -> DataPlane:
    listener = Listener.bind("127.0.0.1")
    pipe.send(listener.address)
    other: Address = pipe.recv()
    me = PeerId(job_id=JOB, epoch=EPOCH, rank=Rank(rank))
    meeting = LocalMeeting() if local else None
    return DataPlane.open(me, own, listener, {1 - rank: other}, driver=False, local=meeting)


def report(streams: Mapping[int, Rounds], trips: Mapping[int, Rounds], sums: Mapping[int, Rounds]) -> None:
    print(f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), loopback")  # noqa: DTZ011 - a label
    print("\nThroughput one way, MB/s\n")
    print(table(streams, lambda size, seconds: f"{size / seconds / 1e6:,.0f}"))
    print("\nThere and back, microseconds\n")
    print(table(trips, lambda _, seconds: f"{seconds * 1e6:,.0f}"))
    print("\nAll-reduce, MB/s of the tensor\n")
    print(table(sums, lambda size, seconds: f"{size / seconds / 1e6:,.0f}"))
    worst = min(ratio(rounds) for size, rounds in streams.items() if size >= BAR_FROM)
    print(f"\nOurs to raw TLS from 64 KB up: at least {worst:.2f} (bar {BAR})")


def ratio(rounds: Rounds) -> float:
    """How fast ours is beside raw TLS: the median of the rounds."""
    return statistics.median(seconds[THEIRS] / seconds[OURS] for seconds in rounds)


def table(found: Mapping[int, Rounds], shown: Callable[[int, float], str]) -> str:
    names = list(next(iter(found.values()))[0])
    compared = THEIRS in names
    head = ["message", *names, *(["ours / raw TLS"] if compared else [])]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for size, rounds in found.items():
        cells = [shown(size, min(seconds[name] for seconds in rounds)) for name in names]
        rows.append(f"| {' | '.join([label(size), *cells, *([f'{ratio(rounds):.2f}'] if compared else [])])} |")
    return "\n".join(rows)


def label(size: int) -> str:
    for unit, one in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= one:
            return f"{size // one} {unit}"
    return f"{size} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only up to 1 MB, for a first impression")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.load_or_create(Path(folder), SYSTEM_CLOCK)
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=measure, args=(theirs, 1, credentials(authority, 1), quick))
        child.start()
        measure(ours, 0, credentials(authority, 0), quick)
        child.join()


if __name__ == "__main__":
    main()
