"""One optimizer step on two ranks, cut by pipeline, data or tensor, beside what PyTorch itself offers for it.

Ours: a hub, two supervisors' worth of machinery, two worker processes and this trainer, over the data plane as it is
between processes of one machine, or with --tls as it is between machines. Theirs: two processes on gloo with the batch
already in place: torch.distributed.pipelining (1F1B), DistributedDataParallel, parallelize_module. The same decoder,
the same micro-batches, AdamW, one thread a process. Both stay up and take turns; every round gives a ratio of wall time
and one of CPU time (of all processes of each side, the trainer included), and the table has their medians.

The last columns are the CPU time beyond the products (matrix products and attention, forward and backward), which both
sides compute alike: their time is measured in this process, on matrices of the same shapes, and taken off both. Where
layers are large the products are nearly everything, and no implementation can halve the whole.

The bar is 1.1 for wall time; for tensor parallel also half of the CPU time beyond the products.

    python benchmarks/four_d.py [--axes pp dp tp] [--rounds 15] [--steps 10] [--tls]
                                [--width 256] [--rows 8] [--length 128]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from distensor.core import SYSTEM_CLOCK, ParallelConfig
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer
from distensor.training.sessions import session
from distensor.transport.local_lanes import default_directory

BAR = 1.1
TP_CPU_BAR = 0.5
VOCABULARY = 512
HEADS = 4
LAYERS = 4
MICRO_BATCHES = {"pp": 4, "dp": 1, "tp": 1}


class Block(nn.Module):
    """`parts`: into how many tensor parallelism cuts it; this is one of them."""

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        own = width // parts
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, own, bias=False) for _ in range(3))
        self.o = nn.Linear(own, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * own), nn.Linear(4 * own, width)
        self.head_width = width // HEADS

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(rows, length, -1, self.head_width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """ids -> logits. A part of it (for stock pipelining) has no embedding or no head."""

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, parts) for _ in range(LAYERS))
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.head: nn.Linear | None = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int
    rows: int
    length: int


def batch(size: Size) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (size.rows, size.length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


Step = Callable[[], None]


def _stock_pp(rank: int, size: Size) -> Step:
    model = Decoder(size.width)
    half = LAYERS // 2
    if rank == 0:
        model.layers, model.norm, model.head = model.layers[:half], None, None
    else:
        model.layers, model.embed = model.layers[half:], None
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES["pp"], loss_fn=next_token)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = batch(size)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()

    return step


def _stock_dp(rank: int, size: Size) -> Step:
    model = nn.parallel.DistributedDataParallel(Decoder(size.width))
    inputs, targets = (part.chunk(2)[rank] for part in batch(size))
    return _plain_step(model, inputs, targets)


def _stock_tp(rank: int, size: Size) -> Step:
    del rank
    mesh = dist.init_device_mesh("cpu", (2,))
    model = Decoder(size.width)
    columns = {f"layers.{layer}.{name}": ColwiseParallel() for layer in range(LAYERS) for name in ("q", "k", "v", "up")}
    rows = {f"layers.{layer}.{name}": RowwiseParallel() for layer in range(LAYERS) for name in ("o", "down")}
    parallelize_module(model, mesh, {**columns, **rows})
    return _plain_step(model, *batch(size))


def _plain_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        next_token(model(inputs), targets).backward()
        optimizer.step()

    return step


STOCK: Mapping[str, Callable[[int, Size], Step]] = {"pp": _stock_pp, "dp": _stock_dp, "tp": _stock_tp}
NAMES = {"pp": "torch.distributed.pipelining", "dp": "DistributedDataParallel", "tp": "parallelize_module"}


def _stock_process(axis: str, rank: int, size: Size, folder: str, orders: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    step = STOCK[axis](rank, size)
    while (count := orders.recv()) > 0:
        for _ in range(count):
            step()
        orders.send(True)
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Side:
    """Something that does `count` steps and whose processes are known."""

    run: Callable[[int], None]
    pids: Callable[[], list[int]]

    def measure(self, steps: int) -> Cost:
        """Of one step, as a mean over `steps` of them."""
        before, started = _cpu_seconds(self.pids()), SYSTEM_CLOCK.monotonic()
        self.run(steps)
        wall, cpu = SYSTEM_CLOCK.monotonic() - started, _cpu_seconds(self.pids()) - before
        return Cost(wall / steps, cpu / steps)


class Cost(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def _cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes, all threads, also those that have ended."""
    if platform.system() == "Linux":
        # clock_getcpuclockid(3): psutil's figures count hundredths of a second, and a step takes few of them.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(float(each.user + each.system) for each in times)


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Products(TorchDispatchMode):
    """Adds up the CPU time of matrix products and attention, forward and backward, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _PRODUCTS and "dot_product" not in name:
            return func(*args, **(kwargs or {}))
        started = time.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.seconds += time.thread_time() - started


def products(axis: str, size: Size) -> float:
    """Seconds of CPU time that the products of one step take on both ranks together: the median of some steps."""
    inputs, targets = batch(size)
    model = Decoder(size.width, parts=2 if axis == "tp" else 1)
    parts = {"pp": MICRO_BATCHES["pp"], "dp": 2, "tp": 1}[axis]
    ranks = 2 if axis == "tp" else 1
    found = []
    for _ in range(9):
        with Products() as counted:
            for part, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                next_token(model(part), wanted).backward()
        found.append(ranks * counted.seconds)
    return statistics.median(found)


@contextmanager
def stock(axis: str, size: Size) -> Iterator[Side]:
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    with TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_stock_process, args=(axis, rank, size, folder, pipes[rank][1]), daemon=True)
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()

        def run(count: int) -> None:
            for ours, _ in pipes:
                ours.send(count)
            for ours, _ in pipes:
                if not ours.poll(120.0):
                    raise TimeoutError(f"{NAMES[axis]} did not answer")
                ours.recv()

        yield Side(run=run, pids=lambda: [int(worker.pid or 0) for worker in workers])
        for ours, _ in pipes:
            ours.send(0)
        for worker in workers:
            worker.join(30.0)


PARALLEL = {
    "pp": ParallelConfig(pipeline_parallel=2),
    "dp": ParallelConfig(data_parallel=2),
    "tp": ParallelConfig(tensor_parallel=2),
}
_COLUMNS = {f"layers.*.{name}.weight": Shard(dim=0) for name in ("q", "k", "v", "up")}
_ROWS = {f"layers.*.{name}.weight": Shard(dim=1) for name in ("o", "down")}


def declared(axis: str, width: int) -> DistributedModel:
    stages = [["embed", "layers.[0-1]"], ["layers.[2-3]", "norm", "head"]]
    return DistributedModel(
        Decoder(width),
        stage_mapping=StageMapping(stages) if axis == "pp" else None,
        tp_spec=ShardingSpec({**_COLUMNS, "layers.*.up.bias": Shard(dim=0), **_ROWS}) if axis == "tp" else None,
    )


@contextmanager
def ours(axis: str, size: Size) -> Iterator[Side]:
    """The CPU time of hub and supervisors counts too."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with (
        session("local", workers=2) as mesh,
        Trainer(
            declared(axis, size.width),
            parallel=PARALLEL[axis],
            loss=lambda outputs, given: next_token(outputs, given[1]),
            micro_batches=MICRO_BATCHES[axis],
            progress=False,
            session=mesh,
        ) as trainer,
    ):
        given = batch(size)

        def run(count: int) -> None:
            for _ in range(count):
                trainer.step(given)

        run(1)
        own = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]
        yield Side(run=run, pids=lambda: [psutil.Process().pid, *own])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rounds of one axis."""

    own: list[Cost]
    theirs: list[Cost]
    products: float

    def ratio(self, of: Callable[[Cost], float]) -> float:
        """The median of the ratios of the rounds."""
        return statistics.median(of(mine) / of(their) for mine, their in zip(self.own, self.theirs, strict=True))

    def cells(self, of: Callable[[Cost], float]) -> list[str]:
        times = (statistics.median(map(of, side)) * 1e3 for side in (self.own, self.theirs))
        return [*(f"{each:.1f}" for each in times), f"{self.ratio(of):.2f}"]

    def beyond(self, cost: Cost) -> float:
        """Seconds of CPU time beyond the products."""
        return cost.cpu - self.products


def compare(axis: str, size: Size, rounds: int, steps: int) -> Comparison:
    found: dict[bool, list[Cost]] = {True: [], False: []}
    counted = []
    with stock(axis, size) as theirs, ours(axis, size) as own:
        for side in (theirs, own):
            side.run(steps)
        for index in range(rounds):
            for is_own in (True, False) if index % 2 else (False, True):
                found[is_own].append((own if is_own else theirs).measure(steps))
            counted.append(products(axis, size))  # beside each round: the processor's speed changes
    return Comparison(own=found[True], theirs=found[False], products=statistics.median(counted))


HEADINGS = (
    "axis", "beside", "ours, ms", "theirs, ms", "wall, ratio", "ours, CPU ms", "theirs, CPU ms", "CPU, ratio",
    "products, CPU ms", "ours beyond, ms", "theirs beyond, ms", "beyond, ratio",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="*", default=["pp", "dp", "tp"], choices=list(STOCK))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of each side in one round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tls", action="store_true", help="keep TLS between the processes, as between machines")
    options = parser.parse_args()
    size = Size(width=options.width, rows=options.rows, length=options.length)
    torch.set_num_threads(1)
    for row in (HEADINGS, ("---",) * len(HEADINGS)):
        print(f"| {' | '.join(row)} |")
    with no_meeting() if options.tls else nullcontext():
        return _print_rows(options.axes, size, options.rounds, options.steps)


@contextmanager
def no_meeting() -> Iterator[None]:
    """Where the directory of Unix sockets would be, there is a file: lanes of what is started meanwhile stay TLS."""
    with (
        TemporaryDirectory() as folder,
        mock.patch("tempfile.tempdir", folder),
        mock.patch.dict(os.environ, {"TMPDIR": folder}),
    ):
        default_directory(os.geteuid()).touch()
        yield


def _print_rows(axes: Sequence[str], size: Size, rounds: int, steps: int) -> int:
    missed = []
    for axis in axes:
        found = compare(axis, size, rounds, steps)
        wall, cpu = found.cells(lambda cost: cost.wall), found.cells(lambda cost: cost.cpu)
        beyond = [f"{found.products * 1e3:.1f}", *found.cells(found.beyond)]
        print(f"| {axis} | {' | '.join([NAMES[axis], *wall, *cpu, *beyond])} |", flush=True)
        if found.ratio(lambda cost: cost.wall) > BAR:
            missed.append(f"{axis}: wall {wall[-1]}, bar {BAR}")
        if axis == "tp" and found.ratio(found.beyond) > TP_CPU_BAR:
            missed.append(f"{axis}: CPU beyond the products {beyond[-1]}, bar {TP_CPU_BAR}")
    print("; ".join(missed) or "all within their bars")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
