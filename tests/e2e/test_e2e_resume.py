"""A trainer is killed, started again, and goes on with its living workers: with the numbers of an undisturbed run."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from local_socket import snapshot

from distensor.training import Session

SECONDS = 180.0
RANKS = 2
"""Each with one micro-batch a step."""


class Child:
    """`taken_child.py`, and what it says."""

    def __init__(self, mesh: Session, steps: int, job: str = "", folder: str = "") -> None:
        assert mesh.cluster is not None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.said: list[list[str]] = []
        environment = {**os.environ, "DISTENSOR_TOKEN": mesh.cluster.trainer_token}
        self._errors = Path(mesh.cluster.folder) / "trainer.log"
        with self._errors.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("taken_child.py")), str(steps), job, folder],
                stdout=subprocess.PIPE, stderr=log, env=environment, text=True,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, *words: str) -> list[str]:
        """The line that begins with these words."""
        deadline = time.monotonic() + SECONDS
        while True:
            line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, self._errors.read_text()[-4000:]
            self.said.append(line.split())
            if tuple(self.said[-1][: len(words)]) == words:
                return self.said[-1]

    def losses(self, kind: str = "step") -> dict[int, str]:
        return {int(words[1]): words[2] for words in self.said if words[0] == kind}

    def end(self) -> None:
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        while self.lines.get(timeout=SECONDS) is not None:
            pass
        self.end()


@contextmanager
def child(mesh: Session, steps: int, job: str = "", folder: str = "") -> Iterator[Child]:
    started = Child(mesh, steps, job, folder)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


@pytest.fixture(scope="module")
def undisturbed(mesh: Session) -> tuple[dict[int, str], str, str]:
    with child(mesh, 30) as one:
        weights = one.wait_for("weights")[1]
        one.end()
    return one.losses(), next(words[1] for words in one.said if words[0] == "average"), weights


def units_of(mesh: Session) -> int:
    return sum(node.confirmed_micro for node in mesh.query_mesh().nodes)


def assert_credited(mesh: Session, micro: int) -> None:
    deadline = time.monotonic() + SECONDS
    while units_of(mesh) < micro:
        assert time.monotonic() < deadline, f"{units_of(mesh)} of {micro}"
        time.sleep(0.05)
    assert units_of(mesh) == micro


def test_a_trainer_that_was_killed_goes_on_with_its_workers(
    mesh: Session, undisturbed: tuple[dict[int, str], str, str]
) -> None:
    """In the second pass over shuffled data: position, order, schedule, average and optimizer are those of before."""
    losses, average, weights = undisturbed
    paid = units_of(mesh)
    with child(mesh, 30) as one:
        job = one.wait_for("job")[1]
        one.wait_for("step", "11")
        one.kill()
    workers = worker_pids(mesh)
    with child(mesh, 30, job) as two:
        two.wait_for("step")
        assert worker_pids(mesh) == workers, "the same processes"
        assert two.wait_for("weights")[1] == weights
        two.end()
    assert next(words[1] for words in two.said if words[0] == "average") == average
    assert two.losses()[30] == losses[30]
    both = two.losses("earlier") | two.losses()
    assert both == losses, "each step once, with its loss"
    assert min(two.losses()) >= 12, "what was committed is not trained again"
    assert_credited(mesh, paid + 30 * RANKS * 1000)


def worker_pids(mesh: Session) -> list[int]:
    assert mesh.cluster is not None
    data = [snapshot(node.socket) for node in mesh.cluster.nodes]
    return [worker["pid"] for each in data for worker in each["workers"] if worker["pid"] is not None]
