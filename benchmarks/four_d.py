"""One optimizer step on two ranks, cut by pipeline, data or tensor, beside what PyTorch itself offers for it.

Ours: a hub, two supervisors' worth of machinery, two worker processes and this trainer, over TLS. Theirs: two
processes on gloo with the batch already in place: torch.distributed.pipelining (1F1B), DistributedDataParallel,
parallelize_module. The same decoder, the same micro-batches, AdamW, one thread a process. Both stay up and take turns;
every round gives a ratio of wall time and one of CPU time (of all processes of each side, the trainer included), and
the table has their medians. The bar is 1.1 for wall time; for tensor parallel also half of the CPU time.

    python benchmarks/four_d.py [--axes pp dp tp] [--rounds 15] [--width 256] [--rows 8] [--length 128]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from distensor.core import SYSTEM_CLOCK, ParallelConfig
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Trainer
from distensor.training.sessions import session

BAR = 1.1
VOCABULARY = 512
HEADS = 4
LAYERS = 4
MICRO_BATCHES = {"pp": 4, "dp": 1, "tp": 1}
STEPS = 3
"""Of each side in one round."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
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

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))
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

    def measure(self) -> tuple[float, float]:
        """Seconds of wall and of CPU time for STEPS steps."""
        before, started = _cpu_seconds(self.pids()), SYSTEM_CLOCK.monotonic()
        self.run(STEPS)
        return SYSTEM_CLOCK.monotonic() - started, _cpu_seconds(self.pids()) - before


def _cpu_seconds(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(float(each.user + each.system) for each in times)


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


def compare(axis: str, size: Size, rounds: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(wall, CPU) of each round, ours and theirs."""
    with stock(axis, size) as theirs, ours(axis, size) as own:
        for side in (theirs, own):
            side.run(STEPS)
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for index in range(rounds):
            for is_own in (True, False) if index % 2 else (False, True):
                found[is_own].append((own if is_own else theirs).measure())
    return found[True], found[False]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", nargs="*", default=["pp", "dp", "tp"], choices=list(STOCK))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    size = Size(width=options.width, rows=options.rows, length=options.length)
    torch.set_num_threads(1)
    print("| axis | beside | ours, ms | theirs, ms | wall, ratio | ours, CPU ms | theirs, CPU ms | CPU, ratio |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for axis in options.axes:
        own, theirs = compare(axis, size, options.rounds)
        cells = [NAMES[axis]]
        for place in (0, 1):
            ratio = statistics.median(mine[place] / their[place] for mine, their in zip(own, theirs, strict=True))
            times = (statistics.median(side[place] for side in sides) / STEPS * 1e3 for sides in (own, theirs))
            cells += [f"{time:.1f}" for time in times] + [f"{ratio:.2f}"]
            worst = max(worst, ratio) if place == 0 else worst
        print(f"| {axis} | {' | '.join(cells)} |", flush=True)
    print(f"worst ratio of wall time {worst:.2f}, bar {BAR}")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
