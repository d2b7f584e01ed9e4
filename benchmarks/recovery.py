"""How long a job stands still when a worker is lost, and when another one comes in.

Three replicas of the demo's model on this machine. Again and again a worker is killed (SIGKILL) or stopped (SIGSTOP)
while steps run: the time until the survivors' next committed step, beside that of an undisturbed step; then the time
until the replica trains again, and how long the others stood still for it: the longest step from its entry on, less an
undisturbed one. The same once more with the way of ZeRO-3 and sparse updates, where the others wait for the whole copy
of its state. --width makes the model, and so the state, larger. At the end the replicas must be equal to the bit,
and the losses those of one process. Stock gloo notices a silent peer by its group's timeout (15 s), torchft after 2 s.

    python benchmarks/recovery.py [--kills 10] [--stops 3] [--copies 3] [--width 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch

from distensor.core import ParallelConfig
from distensor.demo.model import ModelConfig
from distensor.demo.run import EPS, DemoSettings, build_module, run_in_one_process
from distensor.nn import DistributedModel
from distensor.training import Trainer, members
from distensor.training.sessions import Session, session

REPLICAS = 3
STEPS = 100_000
BOUND = 1e-5


@dataclass(kw_only=True, slots=True)
class Figures:
    """Seconds. `back`: from the loss until the replica trains again. The others' standstill for it, and the time from
    its entry until it trains, where its state comes beside the steps and where they wait for the copy."""

    quiet: list[float] = field(default_factory=list)
    after: dict[str, list[float]] = field(default_factory=lambda: {"SIGKILL": [], "SIGSTOP": []})
    back: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    beside_all: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    waiting_all: list[float] = field(default_factory=list)


def worker_pids(opened: Session) -> list[int]:
    """The processes that hold ranks now."""
    assert opened.cluster is not None
    pids = []
    for node in opened.cluster.nodes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(node.socket))
            stream = connection.makefile("rb")
            lines = [json.loads(stream.readline()) for _ in range(2)]
        workers = lines[1]["data"]["workers"]
        pids += [worker["pid"] for worker in workers if worker["pid"] is not None and worker["state"] == "running"]
    return pids


class Run:
    """Steps of one trainer, and what happened between them."""

    def __init__(self, opened: Session, settings: DemoSettings) -> None:
        self.opened, self.settings, self.figures = opened, settings, Figures()
        model = DistributedModel(build_module(settings))
        parallel = ParallelConfig(data_parallel=REPLICAS)
        options = {"eps": EPS}
        self.trainer = Trainer(
            model, parallel=parallel, lr=settings.lr, optimizer_options=options, progress=False, session=opened
        )
        self.batches = iter(settings.batches())
        self.losses: list[float] = []

    def step(self) -> float:
        started = time.monotonic()
        self.losses.append(self.trainer.step(next(self.batches)).loss)
        return time.monotonic() - started

    @property
    def replicas(self) -> int:
        assert self.trainer.job is not None
        return self.trainer.job.replicas

    def lose(self, how: signal.Signals, draw: random.Random) -> None:
        """One round: quiet steps, a loss in the middle of a step, until all are there again."""
        self.figures.quiet += [self.step() for _ in range(5)]
        victim = draw.choice(worker_pids(self.opened))
        pause = draw.uniform(0, statistics.median(self.figures.quiet))
        pid = os.fork()
        if pid == 0:  # a process of its own: a thread would wait for the interpreter, and so for the step
            time.sleep(pause)
            os.kill(victim, how)
            os._exit(0)
        lost = time.monotonic() + pause
        seconds = 0.0
        while self.replicas == REPLICAS:
            seconds = self.step()
        os.waitpid(pid, 0)
        self.figures.after[how.name].append(seconds)
        self.let_in(self.figures.beside, self.figures.beside_all)
        self.figures.back.append(time.monotonic() - lost)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)

    def let_in(self, stood: list[float], took: list[float]) -> None:
        """Steps until the missing replica trains."""
        job, entered, longest = self.trainer.job, 0.0, 0.0
        assert job is not None
        while self.replicas < REPLICAS:
            before = time.monotonic()
            seconds = self.step()
            if job.topology.parallel.data_parallel == REPLICAS:
                entered = entered or before
                longest = max(longest, seconds)
        took.append(time.monotonic() - entered)
        stood.append(max(0.0, longest - statistics.median(self.figures.quiet)))

    def copy_whole(self) -> None:
        """A worker is killed, and its successor let in the way that makes the others wait."""
        self.figures.quiet += [self.step() for _ in range(3)]
        os.kill(worker_pids(self.opened)[-1], signal.SIGKILL)
        while self.replicas == REPLICAS:
            self.step()
        beside = members.Membership.beside
        members.Membership.beside = property(lambda _: False)  # type: ignore[assignment, method-assign]
        try:
            self.let_in(self.figures.waiting, self.figures.waiting_all)
        finally:
            members.Membership.beside = beside  # type: ignore[method-assign]


def row(what: str, values: list[float]) -> str:
    return f"| {what} | {len(values)} | {statistics.median(values):.2f} s | {max(values):.2f} s |" if values else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--width", type=int, default=ModelConfig().hidden, help="of the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    members.FIRST_TRY_SECONDS = 0.1
    draw = random.Random(arguments.seed)
    width = arguments.width
    model = ModelConfig(hidden=width, intermediate=width * 9 // 4)
    settings = DemoSettings(steps=STEPS, model=model)
    torch.set_num_threads(1)
    with session("local", workers=REPLICAS, nodes=1) as opened:
        run = Run(opened, settings)
        run.step()
        kinds = [signal.SIGKILL] * arguments.kills + [signal.SIGSTOP] * arguments.stops
        for kind in kinds:
            run.lose(kind, draw)
        for _ in range(arguments.copies):
            run.copy_whole()
        assert run.trainer.job is not None
        equal = len(set(run.trainer.job.digests())) == 1
        run.trainer.close()
    taken = DemoSettings(steps=len(run.losses), model=model)
    expected, _ = run_in_one_process(build_module(taken), taken, lambda *_: None)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(run.losses, expected, strict=True))
    figures = run.figures
    if arguments.json:
        own = asdict(figures)
        values = {**own.pop("after"), **own}
        print(json.dumps({**values, "equal": equal, "difference": difference, "steps": len(run.losses)}))
    else:
        print("| from ... to the next committed step | times | median | worst |\n|---|---|---|---|")
        rows = [
            row("an undisturbed step", figures.quiet),
            row("SIGKILL of a worker", figures.after["SIGKILL"]),
            row("SIGSTOP of a worker", figures.after["SIGSTOP"]),
            row("the loss, until the replica trains again", figures.back),
            row("stall of the others while a replica joins", figures.beside),
            row("its entry, until it trains", figures.beside_all),
            row("stall of the others where they wait for the whole copy", figures.waiting),
            row("its entry, until it trains then", figures.waiting_all),
        ]
        print("\n".join(filter(None, rows)))
        print(f"\n{len(run.losses)} steps; replicas equal to the bit: {equal}; against one process: {difference:.1e}")
    return 0 if equal and difference <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
