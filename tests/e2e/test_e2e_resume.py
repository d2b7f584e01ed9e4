"""A trainer is killed, started again, and goes on with its living workers: with the numbers of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import e2e_models as models
import pytest
from killing import SECONDS, TrainerChild
from local_socket import snapshot

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import Session, Trainer, members
from distensor.training.sessions import open_session

RANKS = 2
"""Each with one micro-batch a step."""


class Child(TrainerChild):
    """`taken_child.py`, and what it has said so far."""

    def __init__(self, mesh: Session, steps: int, job: str) -> None:
        assert mesh.cluster is not None
        super().__init__(mesh.cluster.trainer_token, mesh.cluster.folder / "trainer.log", steps, job)
        self.said: list[list[str]] = []

    def wait_for(self, *words: str) -> list[str]:
        """The line that begins with these words."""
        deadline = time.monotonic() + SECONDS
        while True:
            line = self.say(deadline)
            assert line is not None, self.log_tail()
            self.said.append(line)
            if tuple(line[: len(words)]) == words:
                return line

    def end(self) -> None:
        self.said += self.rest()

    def losses(self, kind: str = "step") -> dict[int, str]:
        return {int(words[1]): words[2] for words in self.said if words[0] == kind}


@contextmanager
def child(mesh: Session, steps: int, job: str = "") -> Iterator[Child]:
    started = Child(mesh, steps, job)
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
        said = one.kill()
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
    heard = max(int(words[1]) for words in [*one.said, *said] if words[0] == "step")
    assert min(two.losses()) > heard, "what was committed is not trained again"
    assert_credited(mesh, paid + 30 * RANKS * 1000)


def worker_pids(mesh: Session) -> list[int]:
    assert mesh.cluster is not None
    data = [snapshot(node.socket) for node in mesh.cluster.nodes]
    return [worker["pid"] for each in data for worker in each["workers"] if worker["pid"] is not None]


def test_a_killed_supervisor_takes_its_workers_along_and_its_node_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other replica goes on; the node that was started again gets a worker, which gets the state."""
    monkeypatch.setattr(members, "FIRST_TRY_SECONDS", 0.2)
    batches = models.points(5000)
    opened = open_session("local", workers=2, nodes=2, node_names=["atlas", "bolt"])
    try:
        assert opened.cluster is not None
        trainer = Trainer(
            DistributedModel(models.MLP()), parallel=ParallelConfig(data_parallel=2), loss=models.classify, lr=0.01,
            progress=False, session=opened,
        )  # fmt: skip
        first = trainer.step(batches[0])
        os.kill(opened.cluster.nodes[1].child.pid, signal.SIGKILL)
        losses, job = [first.loss], trainer.job
        assert job is not None
        while job.replicas == 2:
            losses.append(trainer.step(batches[len(losses)]).loss)
        assert [member.node_name for member in job.topology.members] == ["atlas"]
        opened.cluster.restart_node(1)
        while job.replicas == 1:
            losses.append(trainer.step(batches[len(losses)]).loss)
        assert sorted(member.node_name for member in job.topology.members) == ["atlas", "bolt"]
        assert len(set(job.digests())) == 1
        trainer.close()
    finally:
        opened.close()
