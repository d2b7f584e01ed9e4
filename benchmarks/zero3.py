"""Memory, bytes and time of a rank with its weights cut (sync="zero3") beside whole copies, four replicas, AdamW.

A chain of twelve products of 1024 x 1024 (12.6 million parameters, 50.4 MB), as one stage and as twelve. Prints one
Markdown table. "counted" are the bytes of weights and optimizer that a rank keeps, and the most of weights, gradients
and optimizer at any moment of a step, as `StepResult.memory` reports them; "process" is the private memory of a worker
after the last step, less that of a worker with a model of a few bytes.

Then a pass over eight stages of 0.26 MB on two ranks, threads of this process, with links that delay and stages that
sleep: how long it takes with the next stage fetched while one is used, and with each gathered when it is needed.
"""

from __future__ import annotations

import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "sync"), str(TESTS / "transport")]

from sync_kit import in_group, planes_of  # noqa: E402 - the kits of the tests are found by path

from distensor.core import SYSTEM_CLOCK, ParallelConfig  # noqa: E402
from distensor.core.pipeline_simulation import LinkSeconds  # noqa: E402
from distensor.nn import DistributedModel, StageMapping  # noqa: E402
from distensor.sync import ShardedWeights  # noqa: E402
from distensor.testing.slow_links import SlowPlane  # noqa: E402
from distensor.training import Session, Trainer  # noqa: E402
from distensor.training.sessions import session  # noqa: E402

RANKS, LAYERS, WIDTH, ROWS, STEPS = 4, 12, 1024, 16, 6
MB = 1e6
STAGES, USE = 8, 0.02
LINKS = {"no delay": LinkSeconds(), "10 ms": LinkSeconds(latency=0.01), "20 ms": LinkSeconds(latency=0.02)}


class Chain(nn.Module):
    """inputs (rows, width) -> (rows, width)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


def squared(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def workers() -> list[psutil.Process]:
    every = psutil.Process().children(recursive=True)
    return [process for process in every if "distensor.node" in " ".join(process.cmdline())]


def measure(mesh: Session, width: int, stages: int, sync: str) -> dict[str, float]:
    """Figures of the rank that takes most of each."""
    mapping = StageMapping([[f"layers.{index}"] for index in range(stages)]) if stages > 1 else None
    batch = (torch.randn(RANKS * ROWS, width), torch.randn(RANKS * ROWS, width))
    with Trainer(
        DistributedModel(Chain(LAYERS, width), stage_mapping=mapping),
        parallel=ParallelConfig(data_parallel=RANKS),
        loss=squared,
        loss_weight="rows",
        sync=sync,
        schedule="gpipe",
        progress=False,
        session=mesh,
    ) as trainer:
        results = [trainer.step(batch) for _ in range(STEPS)]
        job, last = trainer.job, results[-1].memory
        assert job is not None
        sent = sum(count for (source, target), count in job.bytes_per_link().items() if source >= 0 and target >= 0)
        process = max(process.memory_full_info().uss for process in workers())
    return {
        "kept": max(memory.weights + memory.optimizer for memory in last) / MB,
        "peak": max(memory.peak for memory in last) / MB,
        "process": process / MB,
        "sent": sent / STEPS / RANKS / MB,
        "seconds": statistics.median(result.seconds for result in results[1:]),
    }


def one_pass(group: Any, *, ahead: bool) -> float:
    """Seconds of a forward and a backward through all stages, each used for `USE` seconds."""
    layers = [nn.Linear(256, 256) for _ in range(STAGES)]
    store = ShardedWeights({index: dict(layer.named_parameters()) for index, layer in enumerate(layers)}, group)
    order = [*range(STAGES), *reversed(range(STAGES))]
    started = SYSTEM_CLOCK.monotonic()
    store.begin(1)
    store.expect(order if ahead else [])
    for position, stage in enumerate(order):
        store.turn_to(stage, gradients=position >= STAGES)
        threading.Event().wait(USE)
        if position >= STAGES:
            layers[stage](torch.ones(1, 256)).sum().backward()
    store.finish()
    return SYSTEM_CLOCK.monotonic() - started


def slow_links() -> None:
    print("| latency of a message | fetched ahead, s | gathered when needed, s |")
    print("|---|---|---|")
    for name, link in LINKS.items():
        with planes_of(2) as planes:
            slow: Any = {rank: SlowPlane(plane, lambda *_: link, SYSTEM_CLOCK) for rank, plane in planes.items()}  # noqa: B023 - used within this turn
            found = [
                min(max(in_group(slow, 2, lambda group: one_pass(group, ahead=ahead))) for _ in range(3))  # noqa: B023
                for ahead in (True, False)
            ]
            for plane in slow.values():
                plane.close()
        print(f"| {name} | {found[0]:.2f} | {found[1]:.2f} |")


def main() -> int:
    torch.set_num_threads(1)
    print("| sync | stages | kept, counted MB | peak, counted MB | process MB | sent a step, MB | step, s |")
    print("|---|---|---|---|---|---|---|")
    with session("local", workers=RANKS) as mesh:
        empty = measure(mesh, 4, 1, "allreduce")["process"]
        for sync, stages in (("allreduce", 1), ("zero3", 1), ("zero3", LAYERS)):
            found = measure(mesh, WIDTH, stages, sync)
            print(
                f"| {sync} | {stages} | {found['kept']:.1f} | {found['peak']:.1f} | {found['process'] - empty:.0f} "
                f"| {found['sent']:.1f} | {found['seconds']:.2f} |"
            )
    print()
    slow_links()
    return 0


if __name__ == "__main__":
    sys.exit(main())
