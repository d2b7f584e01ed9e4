"""What the agreement of the process-group helpers costs: each beside the collective of torch that it wraps, on gloo.

Ranks take turns between the two, and the medians of rank 0 are shown, with the median of their ratios.

    python benchmarks/process_groups.py [--ranks 2] [--rounds 200]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist

from distensor.core import distributed as dd
from distensor.core.distributed.agreement import agree
from distensor.core.table import table

SIZES = {"1 KB": 1 << 8, "64 KB": 1 << 14, "4 MB": 1 << 20}
"""float32 elements on each rank."""


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def beside(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Medians of ours and theirs in microseconds, and of their ratio."""
    pairs = []
    for _ in range(rounds):
        dist.barrier()
        pairs.append((seconds(theirs), seconds(ours)))
    pairs = pairs[rounds // 10 :]
    ratios = [mine / other for other, mine in pairs]
    return (
        statistics.median(mine for _, mine in pairs) * 1e6,
        statistics.median(other for other, _ in pairs) * 1e6,
        statistics.median(ratios),
    )


def gathered(x: torch.Tensor, ranks: int) -> torch.Tensor:
    rows = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(rows, x)
    return torch.cat(rows)


def measure(rank: int, ranks: int, rounds: int, ports: Queue[int], results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    port = 0 if rank == 0 else ports.get()
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout, wait_for_workers=False)
    for _ in range(ranks - 1 if rank == 0 else 0):
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    rows: list[tuple[object, ...]] = []
    alone, nothing, _ = beside(lambda: agree(world, "nothing", dict), lambda: None, rounds)
    rows.append(("the agreement alone", "", round(alone), round(nothing), ""))
    for name, elements in SIZES.items():
        x = torch.zeros(elements)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "broadcast": (lambda x=x: dd.broadcast(x, world), lambda x=x: dist.broadcast(x.clone(), 0)),  # type: ignore[misc]
            "cat_outputs_cp": (lambda x=x: dd.cat_outputs_cp(x, 0, world), lambda x=x: gathered(x, ranks)),  # type: ignore[misc]
        }
        for what, (ours, theirs) in pairs.items():
            mine, other, ratio = beside(ours, theirs, rounds)
            rows.append((what, name, round(mine), round(other), f"{ratio:.2f}"))
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ports: Queue[int] = context.Queue()
    results: Queue[Any] = context.Queue()
    arguments = [(rank, options.ranks, options.rounds, ports, results) for rank in range(options.ranks)]
    processes = [context.Process(target=measure, args=each) for each in arguments]
    for process in processes:
        process.start()
    rows = results.get(timeout=300)
    for process in processes:
        process.join(30)
    print(table(("call", "bytes", "ours us", "torch us", "ratio"), rows))


if __name__ == "__main__":
    main()
