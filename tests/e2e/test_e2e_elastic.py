"""Workers are lost while a job runs, and it goes on: with the numbers of a run that nobody disturbed."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import e2e_models as models
import pytest
import torch
from local_socket import ask, snapshot
from torch import Tensor

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.node.faults import Fault, FaultPhase, environment_of, fail_at
from distensor.training import Session, Trainer, members
from distensor.training.sessions import open_session
from distensor.transport.driver import Command

CLOSE = 2e-6
SECONDS = 60.0


@contextmanager
def hurt(monkeypatch: pytest.MonkeyPatch, *faults: Fault, workers: int) -> Iterator[Session]:
    """A cluster whose workers suffer these faults."""
    for name, value in environment_of(*faults).items():
        monkeypatch.setenv(name, value)
    opened = open_session("local", workers=workers, nodes=2, node_names=["atlas", "bolt"])
    try:
        yield opened
    finally:
        opened.close()


def trainer_of(opened: Session, parallel: ParallelConfig, **options: Any) -> Trainer:
    torch.manual_seed(1)
    stages = StageMapping(models.MLP_TWO) if parallel.pipeline_parallel == 2 else None
    model = DistributedModel(models.MLP(), stage_mapping=stages)
    return Trainer(model, parallel=parallel, loss=models.classify, lr=0.01, progress=False, session=opened, **options)


def one_process(batches: Sequence[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step, and the weights after the last."""
    torch.manual_seed(1)
    module = models.MLP()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = models.classify(module(batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def assert_undisturbed(trainer: Trainer, losses: Sequence[float], batches: Sequence[Any]) -> None:
    expected, weights = one_process(batches)
    assert losses == pytest.approx(expected, rel=CLOSE)
    for name, tensor in trainer.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param((FaultPhase.DECIDE, FaultPhase.UPDATE), id="around the decision"),
        pytest.param((FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.REDUCE), id="before", marks=pytest.mark.slow),
    ],
)
def test_a_replica_is_lost_in_each_phase_of_a_step(
    monkeypatch: pytest.MonkeyPatch, phases: Sequence[FaultPhase]
) -> None:
    """One replica is lost in each of several steps: each time the step is committed once, by all that are left."""
    monkeypatch.setattr(members, "FIRST_TRY_SECONDS", 1e6)  # nobody comes back in this test
    count = len(phases) + 2
    faults = [fail_at(count - 1 - index, 2 + index, phase, epoch=1 + index) for index, phase in enumerate(phases)]
    batches = models.points(len(phases) + 3)
    with hurt(monkeypatch, *faults, workers=count) as opened:
        trainer = trainer_of(opened, ParallelConfig(data_parallel=count))
        losses, replicas = [], []
        for batch in batches:
            losses.append(trainer.step(batch).loss)
            assert trainer.job is not None
            replicas.append(trainer.job.replicas)
        assert replicas == [count, *range(count - 1, 1, -1), 2, 2]
        assert trainer.job.topology.epoch == 1 + len(phases)
        assert len(set(trainer.job.digests())) == 1, "replicas are equal to the bit"
        assert_undisturbed(trainer, losses, batches)
        trainer.close()


def test_a_stage_is_lost_and_the_replica_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "FIRST_TRY_SECONDS", 0.1)
    parallel = ParallelConfig(data_parallel=2, pipeline_parallel=2)
    batches = models.points(2000)
    with hurt(monkeypatch, fail_at(1, 3, FaultPhase.FORWARD), workers=4) as opened:
        trainer = trainer_of(opened, parallel)
        losses, job = [], None
        while job is None or job.replicas < 2 or job.topology.epoch == 1:
            losses.append(trainer.step(batches[len(losses)]).loss)
            job = trainer.job
        losses += [trainer.step(batch).loss for batch in batches[len(losses) : len(losses) + 3]]
        first, second, third, fourth = job.digests()
        assert {first, second} == {third, fourth}, "the new replica holds what the other one holds"
        assert first != second
        assert_undisturbed(trainer, losses, batches[: len(losses)])
        done = job.units_done
        trainer.close()
        assert_credited(opened, done * 1000)


def assert_credited(opened: Session, micro: int) -> None:
    """Every unit of every epoch, once: the step that was begun anew counts in the epoch that committed it."""
    deadline = time.monotonic() + SECONDS
    while (paid := sum(node.confirmed_micro for node in opened.query_mesh().nodes)) < micro:
        assert time.monotonic() < deadline, f"{paid} of {micro}"
        time.sleep(0.1)
    assert paid == micro


def test_a_node_whose_owner_drains_it_leaves_the_job_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = models.points(40)
    with hurt(monkeypatch, workers=2) as opened:
        assert opened.cluster is not None
        trainer = trainer_of(opened, ParallelConfig(data_parallel=2))
        losses = [trainer.step(batch).loss for batch in batches[:3]]
        ask(opened.cluster.nodes[1].socket, "drain")
        job = trainer.job
        assert job is not None
        while job.replicas == 2:
            losses.append(trainer.step(batches[len(losses)]).loss)
        assert [member.node_name for member in job.topology.members] == ["atlas"]
        losses.append(trainer.step(batches[len(losses)]).loss)
        assert_undisturbed(trainer, losses, batches[: len(losses)])
        trainer.close()


@pytest.mark.slow
def test_replicas_that_exchange_updates_hold_the_same_weights_after_one_came_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "FIRST_TRY_SECONDS", 0.1)
    batches = models.points(2000)
    with hurt(monkeypatch, fail_at(1, 3, FaultPhase.UPDATE), workers=2) as opened:
        trainer = trainer_of(opened, ParallelConfig(data_parallel=2), sync="distro", sync_options={"k": 4, "chunk": 64})
        losses, job = [], None
        while job is None or job.replicas < 2 or job.topology.epoch == 1:
            losses.append(trainer.step(batches[len(losses)]).loss)
            job = trainer.job
        losses += [trainer.step(batch).loss for batch in batches[len(losses) : len(losses) + 5]]
        extra = {rank: {"wanted": ["0/first.weight", "0/last.bias"]} for rank in range(2)}
        replies = job._connection.command(Command.STATE, {}, extra=extra, most_bytes={0: 1 << 20, 1: 1 << 20})
        first, second = (reply.tensors for reply in replies)
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert losses[-1] < losses[0]
        trainer.close()


def test_a_silent_replica_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: nothing closes, nobody answers; and when it wakes, nobody listens to it any more."""
    batches = models.points(6)
    with hurt(monkeypatch, workers=2) as opened:
        assert opened.cluster is not None
        trainer = trainer_of(opened, ParallelConfig(data_parallel=2))
        losses = [trainer.step(batch).loss for batch in batches[:3]]
        (worker,) = snapshot(opened.cluster.nodes[1].socket)["workers"]
        os.kill(worker["pid"], signal.SIGSTOP)
        try:
            losses.append(trainer.step(batches[3]).loss)
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker["pid"], signal.SIGCONT)
        losses += [trainer.step(batch).loss for batch in batches[4:]]
        assert_undisturbed(trainer, losses, batches)
        trainer.close()


@pytest.mark.slow
def test_where_nothing_was_trained_yet_the_first_step_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = models.points(3)
    with hurt(monkeypatch, fail_at(1, 1, FaultPhase.BACKWARD), workers=2) as opened:
        trainer = trainer_of(opened, ParallelConfig(pipeline_parallel=2))
        assert_undisturbed(trainer, [trainer.step(batch).loss for batch in batches], batches)
        trainer.close()


def test_without_a_replica_the_last_checkpoint_is_gone_on_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One stage of the only replica dies: it gets a new worker, and the data goes back to where the checkpoint is."""
    caplog.set_level(logging.WARNING)
    batches = models.points(9)
    parallel = ParallelConfig(pipeline_parallel=2)
    with hurt(monkeypatch, fail_at(1, 7, FaultPhase.BACKWARD), workers=2) as opened:
        trainer = trainer_of(opened, parallel, checkpoint=tmp_path / "run", checkpoint_every=3)
        history = trainer.fit(batches)
        assert [result.step for result in history.steps] == list(range(1, 10))
        assert_undisturbed(trainer, history.losses, batches)
        assert "going on without it" in caplog.text
        trainer.close()
