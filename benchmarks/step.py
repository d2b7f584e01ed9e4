"""One optimizer step of a data-parallel MLP: time and bytes, beside DistributedDataParallel on gloo.

Two sizes (about 13 thousand and 757 thousand parameters), two replicas, AdamW, on this machine. Prints one Markdown
table. Ours includes the trainer: it hands out the batch and collects the loss; DDP has no such process.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distensor.core import SYSTEM_CLOCK, ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import Session, Trainer
from distensor.training.sessions import session

ROWS = 64
STEPS = 60
SIZES = {"13k": (64, 64, 2), "757k": (256, 512, 2)}


def build(width_in: int, width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = [width_in, *[width] * (layers + 1), 10]
    modules: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def cross_entropy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def ours(mesh: Session, size: tuple[int, int, int]) -> tuple[float, float]:
    """(median seconds a step, bytes that one replica sends to the other in a step)."""
    module = build(*size)
    batch = (torch.randn(ROWS, size[0]), torch.randint(10, (ROWS,)))
    with Trainer(
        DistributedModel(module),
        parallel=ParallelConfig(data_parallel=2),
        loss=cross_entropy,
        progress=False,
        session=mesh,
    ) as trainer:
        results = [trainer.step(batch) for _ in range(STEPS)]
        job = trainer.job
        assert job is not None
        sent = job.bytes_per_link()[0, 1] / STEPS
    return statistics.median(result.seconds for result in results[10:]), sent


def _ddp(rank: int, size: tuple[int, int, int], folder: str, seconds: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(build(*size))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(ROWS // 2, size[0]), torch.randint(10, (ROWS // 2,))
    taken = []
    for _ in range(STEPS):
        started = SYSTEM_CLOCK.monotonic()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        taken.append(SYSTEM_CLOCK.monotonic() - started)
    if rank == 0:
        seconds.value = statistics.median(taken[10:])
    dist.destroy_process_group()


def ddp(size: tuple[int, int, int]) -> float:
    context = get_context("spawn")
    seconds = context.Value("d", 0.0)
    with TemporaryDirectory() as folder:
        workers = [context.Process(target=_ddp, args=(rank, size, folder, seconds)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return float(seconds.value)


def main() -> int:
    torch.set_num_threads(1)
    print("| parameters | ours, ms | DDP on gloo, ms | ours sends, bytes a step | gradient, bytes |")
    print("|---|---|---|---|---|")
    with session("local", workers=2) as mesh:
        for size in SIZES.values():
            parameters = sum(p.numel() for p in build(*size).parameters())
            seconds, sent = ours(mesh, size)
            reference = ddp(size)
            print(
                f"| {parameters:,} | {seconds * 1e3:.1f} | {reference * 1e3:.1f} | {sent:,.0f} | {parameters * 4:,} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
