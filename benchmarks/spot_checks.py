"""What spot checks cost a data-parallel MLP of three replicas: seconds a step and bytes, by the share of units checked.

Real worker processes on this machine, one thread each. Prints one Markdown table.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import Session, Trainer
from distensor.training.sessions import session

ROWS, WIDTH, STEPS, REPLICAS = 192, 512, 120, 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))


def row(mesh: Session, rate: float) -> str:
    batch = (torch.randn(ROWS, 64), torch.randint(10, (ROWS,)))
    with Trainer(
        DistributedModel(build()),
        parallel=ParallelConfig(data_parallel=REPLICAS),
        loss=lambda outputs, given: nn.functional.cross_entropy(outputs, given[1]),
        spot_checks=rate,
        progress=False,
        session=mesh,
    ) as trainer:
        results = [trainer.step(batch) for _ in range(STEPS)][10:]
        job = trainer.job
        assert job is not None
        checks = job.checks
        seconds = [result.seconds for result in results]
        received = statistics.mean(result.bytes_received for result in results)
        each = checks.seconds / max(1, checks.counts.total())
    return (
        f"| {rate:.3f} | {checks.counts.total()} of {STEPS} | {statistics.mean(seconds) * 1e3:.1f} ms "
        f"| {each * 1e3:.1f} ms | {checks.bytes:,} | {received:,.0f} | {checks.largest:.1e} |"
    )


def main() -> None:
    torch.set_num_threads(1)
    print(
        "| share | steps checked | mean step | of the slowest witness, each | bytes of batches sent again "
        "| bytes of answers a step | largest difference |\n|---|---|---|---|---|---|---|"
    )
    with session("local", workers=REPLICAS, nodes=1) as mesh:
        for rate in (0.0, 0.01, 0.1, 1 / REPLICAS):
            print(row(mesh, rate))


if __name__ == "__main__":
    main()
