"""Real training in real processes, of which one after the other is killed: `python killing.py KILLS [SEED]`.

The hub, a worker, a supervisor or the trainer gets SIGKILL at a random moment, and what was killed is started again,
as a service manager would. Everything that is waited for has a deadline; missing it is a hang.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import taken_child
import torch
from e2e_models import classify
from local_socket import snapshot
from safetensors.torch import load_file

from distensor.optim import parse_lr_schedule
from distensor.training.local import LocalCluster
from distensor.training.sessions import Session, open_session

SECONDS = 300.0
"""After a kill, until the next step is committed. Recovery itself is bounded by 120 s."""
STEPS = 1_000_000
KINDS = {"worker": 4, "trainer": 3, "supervisor": 2, "hub": 1}
"""How often each is killed, in parts."""


class TrainerChild:
    """`taken_child.py`, and what it says."""

    def __init__(self, token: str, log: Path, *arguments: object) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log = log
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("taken_child.py")), *map(str, arguments)],
                stdout=subprocess.PIPE, stderr=stream, env={**os.environ, "DISTENSOR_TOKEN": token}, text=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def say(self, deadline: float) -> list[str] | None:
        """The words of the next line; None once it has ended. Raises TimeoutError."""
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"the trainer says nothing; its log ends: {self.log_tail()}") from None
        return None if line is None else line.split()

    def log_tail(self) -> str:
        return self._log.read_text("utf-8", "replace")[-3000:]

    def kill(self) -> list[list[str]]:
        """SIGKILL; what it had said until then."""
        self.process.send_signal(signal.SIGKILL)
        return self.rest()

    def rest(self) -> list[list[str]]:
        """What it says until its end."""
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        said = []
        while (line := self._lines.get(timeout=SECONDS)) is not None:
            said.append(line.split())
        return said


@dataclass(slots=True)
class Figures:
    """What came of it."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    took_over: int = 0
    from_checkpoint: int = 0
    rewound: int = 0
    steps: int = 0
    unknown_losses: int = 0
    lost: int = 0
    duplicated: int = 0
    replicas_equal: bool = False
    loss_difference: float = float("nan")
    weight_difference: float = float("nan")
    seconds: float = 0.0
    longest: float = 0.0

    def lines(self) -> list[str]:
        by_kind = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items()))
        return [
            f"seed                      {self.seed}",
            f"kills                     {self.kills.total()} ({by_kind}) in {self.seconds:.0f} s",
            f"longest to the next step  {self.longest:.1f} s",
            f"hangs                     {self.hangs}",
            f"trainer took over         {self.took_over}, went back to a checkpoint {self.from_checkpoint}",
            f"went back in the data     {self.rewound} (no whole replica was left)",
            f"steps committed           {self.steps}, of which {self.unknown_losses} have no known loss",
            f"acknowledged things lost  {self.lost}",
            f"duplicated credits        {self.duplicated}",
            f"replicas bit-equal        {'yes' if self.replicas_equal else 'NO'}",
            f"against one process       largest relative difference of a loss {self.loss_difference:.1e}, "
            f"of a weight {self.weight_difference:.1e}",
        ]


class Soak:
    """One run with kills at random moments of a seed."""

    def __init__(self, opened: Session, folder: Path, seed: int) -> None:
        assert opened.cluster is not None
        self._opened, self._cluster = opened, opened.cluster
        self._folder = folder
        self._random = random.Random(seed)
        self._losses: dict[int, float] = {}
        self._job = ""
        self._jobs: set[str] = set()
        self._paid = 0
        self.figures = Figures(seed=seed)
        self._trainer = self._start()

    def _start(self) -> TrainerChild:
        self._stop = self._folder / "stop"
        arguments = STEPS, self._job, self._folder / "run", self._stop
        return TrainerChild(self._cluster.trainer_token, self._folder / "trainer.log", *arguments)

    def run(self, kills: int) -> Figures:
        """Raises TimeoutError for what hangs, after counting it."""
        began = time.monotonic()
        try:
            self._go_on(8)  # the first checkpoint is there
            for _ in range(kills):
                self._kill(self._random.choices(list(KINDS), list(KINDS.values()))[0])
                self._go_on(self._random.randint(1, 12))
            self._end()
        except TimeoutError:
            self.figures.hangs += 1
            raise
        finally:
            self.figures.seconds = time.monotonic() - began
        return self.figures

    def _go_on(self, steps: int) -> None:
        """Until so many further steps are committed."""
        started = time.monotonic()
        for index in range(steps):
            self._await_step(time.monotonic() + SECONDS)
            if index == 0:
                self.figures.longest = max(self.figures.longest, time.monotonic() - started)

    def _await_step(self, deadline: float) -> None:
        while True:
            words = self._trainer.say(deadline)
            assert words is not None, f"the trainer ended: {self._trainer.log_tail()}"
            self._note(words)
            if words[0] == "step":
                return

    def _note(self, words: list[str]) -> None:
        match words:
            case ["job", job, _]:
                self._job = job
                self._jobs.add(job)
            case ["step", step, loss]:
                kept = {number: known for number, known in self._losses.items() if number < int(step)}
                self.figures.rewound += len(kept) < len(self._losses)  # the state was lost with all who held it
                self._losses = {**kept, int(step): float(loss)}
            case ["earlier", step, loss]:
                self._losses.setdefault(int(step), float(loss))
            case ["resumed", step, "taken"]:
                self.figures.took_over += 1
                self.figures.lost += any(known > int(step) for known in self._losses)
            case ["resumed", _, _]:
                self.figures.from_checkpoint += 1

    def _kill(self, kind: str) -> None:
        match kind:
            case "trainer":
                for words in self._trainer.kill():
                    self._note(words)
                self._trainer = self._start()
            case "hub":
                self._note_paid()
                os.kill(self._cluster.hub.pid, signal.SIGKILL)
                self._cluster.restart_hub()
                self._note_paid()
            case "supervisor":
                index = self._random.randrange(len(self._cluster.nodes))
                os.kill(self._cluster.nodes[index].child.pid, signal.SIGKILL)
                self._cluster.restart_node(index)
            case _:
                if not (pids := worker_pids(self._cluster)):
                    return
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._random.choice(pids), signal.SIGKILL)
        self.figures.kills[kind] += 1

    def _note_paid(self) -> None:
        """What a node was told that it has earned, it still has after the hub was killed."""
        now = sum(node.confirmed_micro for node in self._opened.query_mesh().nodes)
        self.figures.lost += now < self._paid
        self._paid = max(self._paid, now)

    def _end(self) -> None:
        self._stop.touch()
        deadline = time.monotonic() + SECONDS
        while (words := self._trainer.say(deadline)) is not None:
            self._note(words)
            if words[0] == "replicas":
                self.figures.replicas_equal = len(set(words[1:])) == 1
        assert self._trainer.process.wait(SECONDS) == 0, self._trainer.log_tail()
        self._note_paid()
        self._compare()
        self._check_books()

    def _compare(self) -> None:
        """With the same training in this process."""
        steps = max(self._losses)
        expected, weights = one_process(steps)
        known = {step: loss for step, loss in self._losses.items() if step <= steps}
        self.figures.steps = steps
        self.figures.unknown_losses = steps - len(known)
        self.figures.loss_difference = max(
            abs(loss - expected[step - 1]) / abs(expected[step - 1]) for step, loss in known.items()
        )
        ours = load_file(f"{self._stop}.weights")
        self.figures.weight_difference = max(
            ((ours[name] - tensor).norm() / tensor.norm()).item() for name, tensor in weights.items()
        )

    def _check_books(self) -> None:
        """Every unit is credited at most once, its two postings sum to zero, and so does the whole ledger."""
        path = self._cluster.folder / "hub" / "hub.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as books:
            units = "SELECT count(*), sum(amount) FROM entries GROUP BY job_id, epoch, step, rank"
            rows = books.execute(units).fetchall()
            ((balance,),) = books.execute("SELECT coalesce(sum(amount), 0) FROM balances").fetchall()
            jobs = {job for (job,) in books.execute("SELECT job_id FROM jobs").fetchall()}
        self.figures.duplicated = sum(count != 2 for count, _ in rows)
        self.figures.lost += len(self._jobs - jobs) + (balance != 0) + sum(total != 0 for _, total in rows)

    def close(self) -> None:
        if self._trainer.process.poll() is None:
            self._trainer.kill()


def worker_pids(cluster: LocalCluster) -> list[int]:
    pids = []
    for node in cluster.nodes:
        with contextlib.suppress(OSError, AssertionError):  # a supervisor that has just been started
            workers: list[dict[str, Any]] = snapshot(node.socket)["workers"]
            pids += [worker["pid"] for worker in workers if worker["pid"] is not None]
    return pids


def one_process(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, schedule = taken_child.build(), parse_lr_schedule("cosine")
    optimizer = torch.optim.AdamW(module.parameters(), lr=taken_child.LR)
    losses: list[float] = []
    schedule = schedule.with_total(STEPS)  # type: ignore[union-attr]
    while True:
        for batch in taken_child.loader():
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(len(losses) + 1, taken_child.LR)
            optimizer.zero_grad()
            loss = classify(module(batch[0]), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                return losses, module.state_dict()


def soak(kills: int, seed: int) -> Figures:
    """Raises TimeoutError for a hang."""
    torch.set_num_threads(1)
    opened = open_session("local", workers=6, nodes=2, node_names=["atlas", "bolt"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            running = Soak(opened, Path(folder), seed)
            try:
                return running.run(kills)
            finally:
                running.close()
                print("\n".join(running.figures.lines()), flush=True)
    finally:
        opened.close()


if __name__ == "__main__":
    soak(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else int(time.time()))
