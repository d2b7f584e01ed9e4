"""What a save in the background costs: the step that begins it, the steps beside it, and how long it takes.

One MLP (about 9 million parameters) with AdamW on one and on two workers of this machine. Prints one Markdown table.
`stall` is how long training waits for a save; `copy` is what the slowest worker says it spent on copying, which is all
that the stall should be. While a save is written, it and the steps share this machine's CPUs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from distensor.core import SYSTEM_CLOCK, ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import Session, Trainer
from distensor.training.sessions import session

ROWS = 32
STEPS = 12
SAVES = 3
SIZES = [512, 1024, 2048, 2048, 1024, 10]


def build() -> nn.Module:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for before, after in itertools.pairwise(SIZES):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def cross_entropy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds, medians."""

    step: float
    stall: float
    copy: float
    beside: float
    whole: float


def timed(trainer: Trainer, batch: Any) -> float:
    started = SYSTEM_CLOCK.monotonic()
    trainer.step(batch)
    return SYSTEM_CLOCK.monotonic() - started


def measure(mesh: Session, parallel: ParallelConfig, sync: str, folder: Path) -> Row:
    batch = (torch.randn(ROWS, SIZES[0]), torch.randint(10, (ROWS,)))
    with Trainer(
        DistributedModel(build()), parallel=parallel, loss=cross_entropy, sync=sync, checkpoint=folder,
        progress=False, session=mesh,
    ) as trainer:  # fmt: skip
        plain = statistics.median([timed(trainer, batch) for _ in range(STEPS)][2:])
        stalls, copies, beside, wholes = [], [], [], []
        checkpoints, job = trainer._checkpoints, trainer.job
        assert checkpoints is not None
        assert job is not None
        for _ in range(SAVES):
            started = SYSTEM_CLOCK.monotonic()
            snapshot = job.snapshot()
            stalls.append(SYSTEM_CLOCK.monotonic() - started)
            copies.append(snapshot.copy_seconds)
            checkpoints.begin(trainer.steps_done, snapshot, trainer.model.module, {"lr": 1e-3}, None)
            while checkpoints.busy:
                beside.append(timed(trainer, batch))
            checkpoints.wait()
            wholes.append(SYSTEM_CLOCK.monotonic() - started)
    return Row(
        step=plain,
        stall=statistics.median(stalls),
        copy=statistics.median(copies),
        beside=statistics.median(beside),
        whole=statistics.median(wholes),
    )


def main() -> int:
    torch.set_num_threads(1)
    parameters = sum(p.numel() for p in build().parameters())
    print(f"{parameters:,} parameters, {3 * 4 * parameters / 1e6:.0f} MB a checkpoint")
    print("| ranks | step, ms | stall, ms | copy, ms | steps beside a save, ms | whole save, s |")
    print("|---|---|---|---|---|---|")
    cases = ((ParallelConfig(), "allreduce"), (ParallelConfig(data_parallel=2), "zero3"))
    with session("local", workers=2) as mesh, TemporaryDirectory() as folder:
        for index, (parallel, sync) in enumerate(cases):
            row = measure(mesh, parallel, sync, Path(folder) / str(index))
            print(
                f"| {parallel.world_size} ({sync}) | {row.step * 1e3:.0f} | {row.stall * 1e3:.0f} "
                f"| {row.copy * 1e3:.0f} | {row.beside * 1e3:.0f} | {row.whole:.2f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
