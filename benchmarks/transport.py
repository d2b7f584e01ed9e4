"""Throughput on loopback: raw TCP, raw TLS 1.3, gloo and our data plane, 1 KB to 64 MB, as one markdown table.

Two processes play ping-pong with messages of each size; MB/s is what one direction carries (bytes both ways by time).
The last two columns are an all-reduce of a float32 tensor of that size in two processes, bytes of the tensor by time.
Best of five rounds each, taken in turns.

    python benchmarks/transport.py [--quick]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Sequence
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
from distensor.transport import Address, Channel, Credentials, DataPlane, Listener, PeerId, Tag
from distensor.transport.group import TransportGroup
from distensor.transport.identity import client_context, server_context

JOB, EPOCH = JobId("j_benchmark"), Epoch(1)
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
ROUNDS = 5

Exchange = Callable[[int, int], None]
"""Called with (size, repetitions): that many ping-pongs."""


def credentials(authority: Authority, rank: int) -> Credentials:
    key, request = new_key_and_csr(JOB, EPOCH, Rank(rank))
    certificate = authority.sign(request, JOB, EPOCH, Rank(rank))
    return Credentials(key_pem=key, certificate_pem=certificate, authority_pem=authority.authority_pem)


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.recv_into(view) :]


def socket_exchange(connection: socket.socket, rank: int) -> Exchange:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(size: int, repetitions: int) -> None:
        data, room = bytes(size), memoryview(bytearray(size))
        for _ in range(repetitions):
            if rank == 0:
                connection.sendall(data)
            receive_exactly(connection, room)
            if rank == 1:
                connection.sendall(data)

    return run


def gloo_exchange(rank: int) -> Exchange:
    def run(size: int, repetitions: int) -> None:
        data, room = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        for _ in range(repetitions):
            if rank == 0:
                dist.send(data, 1)
            dist.recv(room, 1 - rank)
            if rank == 1:
                dist.send(data, 0)

    return run


def plane_exchange(plane: DataPlane, rank: int) -> Exchange:
    def run(size: int, repetitions: int) -> None:
        data = bytes(size)
        for _ in range(repetitions):
            if rank == 0:
                plane.send(1, Tag(Channel.P2P), b"", [data])
            plane.recv(1 - rank, Tag(Channel.P2P), 60)
            if rank == 1:
                plane.send(0, Tag(Channel.P2P), b"", [data])

    return run


def all_reduces(group: Any) -> Exchange:
    options = AllreduceOptions()
    options.asyncOp = False

    def run(size: int, repetitions: int) -> None:
        data = torch.ones(size // 4)
        for _ in range(repetitions):
            group.allreduce([data], options).wait()

    return run


def fastest(runs: dict[str, Exchange], size: int, budget: int) -> dict[str, float]:
    """Seconds of one repetition of each, the best of some rounds taken in turns, so that all see the same machine."""
    repetitions = max(2, min(200, budget // size))
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            run(size, 1)
            start = time.perf_counter()
            run(size, repetitions)
            best[name] = min(best[name], (time.perf_counter() - start) / repetitions)
    return best


def measure(pipe: Connection, rank: int, own: Credentials, quick: bool) -> None:
    torch.set_num_threads(1)
    sizes, budget = (SIZES[:5], 1 << 22) if quick else (SIZES, 1 << 26)
    raw, secured = meet(pipe, rank), secure(meet(pipe, rank), rank, own)
    dist.init_process_group("gloo", store=pipe_store(pipe, rank), rank=rank, world_size=2)
    with open_plane(pipe, rank, own) as plane:
        ours = TransportGroup(plane, (0, 1), rank, name="benchmark", timeout=600.0, clock=SYSTEM_CLOCK)
        runs = {
            "raw TCP": socket_exchange(raw, rank),
            "raw TLS 1.3": socket_exchange(secured, rank),
            "gloo": gloo_exchange(rank),
            "distensor (TLS)": plane_exchange(plane, rank),
            "gloo all_reduce": all_reduces(dist.group.WORLD),
            "distensor all_reduce (TLS)": all_reduces(ours),
        }
        seconds = [fastest(runs, size, budget) for size in sizes]
        ours.shutdown()
    dist.destroy_process_group()
    if rank == 0:
        print(table(sizes, seconds))


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


def open_plane(pipe: Connection, rank: int, own: Credentials) -> DataPlane:
    listener = Listener.bind("127.0.0.1")
    pipe.send(listener.address)
    other: Address = pipe.recv()
    me = PeerId(job_id=JOB, epoch=EPOCH, rank=Rank(rank))
    return DataPlane.open(me, own, listener, {1 - rank: other}, driver=False)


def table(sizes: Sequence[int], seconds: Sequence[dict[str, float]]) -> str:
    names = list(seconds[0])
    head = f"| message | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    rows = []
    for size, times in zip(sizes, seconds, strict=True):
        label = f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"
        # A ping-pong carries the size twice; an all-reduce is quoted by the size of its tensor.
        speeds = [(1 if "reduce" in name else 2) * size / times[name] / 1e6 for name in names]
        rows.append(f"| {label} | " + " | ".join(f"{speed:,.0f}" for speed in speeds) + " |")
    machine = f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), loopback, MB/s"  # noqa: DTZ011 - a label
    return f"{machine}\n\n{head}\n" + "\n".join(rows)


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
