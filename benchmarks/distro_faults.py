"""What lost messages and a lost worker cost a job whose replicas exchange updates.

A small language model on the bytes of Python's own library, three replicas in processes of their own, sync="distro".
For each seed: one run that nobody disturbs, and one in which a share of the messages does not arrive (each update at
each receiver, drawn anew), and one worker is killed (SIGKILL) after a third of the steps and comes back. The loss is
the mean of the last tenth of the steps. Its noise is the standard deviation between seeds of the undisturbed runs. At
the end of each run what all replicas have in common must be equal to the bit.

    python benchmarks/distro_faults.py [--steps 300] [--seeds 3] [--lost 0.25] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from distensor.core import ParallelConfig
from distensor.demo.model import ModelConfig
from distensor.demo.run import DemoSettings, build_module
from distensor.nn import DistributedModel
from distensor.node.faults import Fault, FaultPhase, Loss, environment_of, fail_at, lose
from distensor.training import Trainer, members
from distensor.training.job import TrainingJob
from distensor.training.sessions import session
from distensor.transport.driver import Command

REPLICAS = 3
MODEL = ModelConfig(hidden=64, layers=2, intermediate=144)
MOST_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one run. `left_out`: contributions that all replicas went on without; `alone`: steps without a replica."""

    loss: float
    equal: bool
    left_out: int
    alone: int
    epochs: int


def run(seed: int, steps: int, faults: Sequence[Fault | Loss]) -> Outcome:
    """Steps of one job, in a cluster whose workers suffer `faults`."""
    os.environ.update(environment_of(*faults))
    settings = DemoSettings(steps=steps, rows=24, seed=seed, model=MODEL)
    losses, left_out, alone = [], 0, 0
    with session("local", workers=REPLICAS, nodes=1) as opened:
        trainer = Trainer(
            DistributedModel(build_module(settings)), parallel=ParallelConfig(data_parallel=REPLICAS), lr=4e-3,
            sync="distro", progress=False, session=opened,
        )  # fmt: skip
        for batch in settings.batches():
            result = trainer.step(batch)
            losses.append(result.loss)
            left_out += len(result.dropped)
            alone += trainer.job is not None and trainer.job.replicas < REPLICAS
        assert trainer.job is not None
        equal, epochs = is_equal(trainer.job), int(trainer.job.topology.epoch)
        trainer.close()
    tail = losses[-max(1, steps // 10) :]
    return Outcome(loss=statistics.fmean(tail), equal=equal, left_out=left_out, alone=alone, epochs=epochs)


def is_equal(job: TrainingJob) -> bool:
    """Whether all replicas hold the same weights, to the bit."""
    layout = next(iter(job._ranks.pieces.replies(gradients=False).values()))
    ranks = range(job.topology.parallel.world_size)
    extra = {rank: {"wanted": list(layout)} for rank in ranks}
    most = dict.fromkeys(ranks, MOST_BYTES)
    first, *others = job._connection.command(Command.STATE, {}, extra=extra, most_bytes=most)
    return all(torch.equal(first.tensors[key], other.tensors[key]) for other in others for key in layout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lost", type=float, default=0.25)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds: at least 2, else there is no noise to compare with")
    members.FIRST_TRY_SECONDS = 0.1
    torch.set_num_threads(1)
    quiet: list[Outcome] = []
    hurt: list[Outcome] = []
    for seed in range(1, arguments.seeds + 1):
        killed = fail_at(1, arguments.steps // 3, FaultPhase.BACKWARD)
        faults: list[Fault | Loss] = [lose(arguments.lost, seed=seed), killed]
        quiet.append(run(seed, arguments.steps, []))
        hurt.append(run(seed, arguments.steps, faults))
    noise = statistics.stdev(outcome.loss for outcome in quiet)
    means = [statistics.fmean(outcome.loss for outcome in outcomes) for outcomes in (quiet, hurt)]
    if arguments.json:
        print(json.dumps({"quiet": [asdict(o) for o in quiet], "hurt": [asdict(o) for o in hurt], "noise": noise}))
    else:
        print("| seed | undisturbed | with faults | left out | steps with a replica missing |\n|---|---|---|---|---|")
        for seed, (one, other) in enumerate(zip(quiet, hurt, strict=True), 1):
            print(f"| {seed} | {one.loss:.4f} | {other.loss:.4f} | {other.left_out} | {other.alone} |")
        change = means[1] / means[0] - 1
        print(f"\nmean {means[0]:.4f} and {means[1]:.4f} ({change:+.1%})")
        print(f"between seeds {noise:.4f} ({noise / means[0]:.1%} of the loss)")
        print(f"replicas equal to the bit: {all(outcome.equal for outcome in (*quiet, *hurt))}")
    lost = all(outcome.epochs > 1 for outcome in hurt)
    return 0 if lost and all(outcome.equal for outcome in (*quiet, *hurt)) else 1


if __name__ == "__main__":
    sys.exit(main())
