"""Processes are killed while a job runs. Nothing hangs, nothing is left over, nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import e2e_models as models
import mesh_models as decoders
import psutil
import pytest
from local_socket import snapshot, wait_until

from distensor.core import ParallelConfig
from distensor.core.errors import JobFailedError, WorkerLostError
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.training import Session, Trainer
from distensor.training.local import LocalCluster
from distensor.training.sessions import open_session

DP2_PP2 = ParallelConfig(data_parallel=2, pipeline_parallel=2)


TP2_CP2 = ParallelConfig(tensor_parallel=2, context_parallel=2)


@pytest.fixture
def fresh() -> Iterator[Session]:
    """A cluster for one test, since it will be hurt."""
    opened = open_session("local", workers=4, nodes=2, node_names=["atlas", "bolt"])
    yield opened
    opened.close()


def cluster_of(opened: Session) -> LocalCluster:
    assert opened.cluster is not None
    return opened.cluster


def start(opened: Session) -> Trainer:
    """A job that a lost worker ends."""
    model = DistributedModel(models.MLP(), stage_mapping=StageMapping(models.MLP_TWO))
    return Trainer(
        model, parallel=DP2_PP2, loss=models.classify, lr=0.01, progress=False, session=opened, elastic=False
    )


def test_a_worker_that_dies_within_a_collective_of_a_program_is_named(fresh: Session) -> None:
    """All ranks of tp and cp wait for each other in the middle of a forward or backward pass."""
    atlas = cluster_of(fresh).nodes[0].socket
    spec = ShardingSpec({name: Shard(dim=dim) for name, dim in decoders.SHARDED.items()})
    model = DistributedModel(decoders.Decoder(), tp_spec=spec)
    trainer = Trainer(model, parallel=TP2_CP2, progress=False, session=fresh)
    trainer.step(decoders.texts(1)[0])
    victim = snapshot(atlas)["workers"][0]
    killer = threading.Timer(0.3, os.kill, (victim["pid"], signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match=rf"rank {victim['rank']} on node 'atlas'.*SIGKILL.*no checkpoint"):
        step_for_ever(trainer, decoders.texts(1)[0])
    assert trainer.failure
    assert time.monotonic() - started < 30
    trainer.close()


def step_for_ever(trainer: Trainer, batch: Any = None) -> None:
    while True:
        trainer.step(models.points(1)[0] if batch is None else batch)


def worker_pids(data: dict[str, Any]) -> list[int]:
    return [worker["pid"] for worker in data["workers"] if worker["pid"] is not None]


def test_a_killed_worker_is_named_restarted_and_never_a_hang(fresh: Session) -> None:
    atlas = cluster_of(fresh).nodes[0].socket
    trainer = start(fresh)
    trainer.step(models.points(1)[0])
    victim = snapshot(atlas)["workers"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerLostError, match=rf"rank {victim['rank']} on node 'atlas'.*SIGKILL"):
        step_for_ever(trainer)
    assert time.monotonic() - started < 20

    def restarted(data: dict[str, Any]) -> bool:
        worker = next(w for w in data["workers"] if w["rank"] == victim["rank"])
        return worker["restarts"] >= 1 and worker["pid"] not in (None, victim["pid"])

    data = wait_until(atlas, restarted)
    worker = next(w for w in data["workers"] if w["rank"] == victim["rank"])
    assert "SIGKILL" in worker["last_exit"]
    assert any("SIGKILL" in event["text"] for event in data["events"])
    with pytest.raises(JobFailedError, match="has ended"):
        trainer.step(models.points(1)[0])
    trainer.close()
    wait_until(atlas, lambda seen: not worker_pids(seen))


def is_alive(process: psutil.Process) -> bool:
    """A zombie is dead: whether somebody has collected its status is the business of its new parent."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_supervisor_leaves_no_worker_after_a_second(fresh: Session) -> None:
    node = cluster_of(fresh).nodes[1]
    trainer = start(fresh)
    trainer.step(models.points(1)[0])
    workers = [psutil.Process(pid) for pid in worker_pids(snapshot(node.socket))]
    assert len(workers) == 2
    os.kill(node.child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, f"still there: {workers}"
        time.sleep(0.01)
    with pytest.raises(WorkerLostError, match="node 'bolt'"):
        step_for_ever(trainer)


def test_training_goes_on_without_the_hub_and_every_unit_is_credited_once(fresh: Session) -> None:
    cluster = cluster_of(fresh)
    module, batches = models.MLP(), models.points(60)
    model = DistributedModel(module, stage_mapping=StageMapping(models.MLP_TWO))
    trainer = Trainer(model, parallel=DP2_PP2, loss=models.classify, progress=False, session=fresh)
    generation = fresh.query_mesh().generation
    for batch in batches[:20]:
        trainer.step(batch)
    os.kill(cluster.hub.pid, signal.SIGKILL)
    for batch in batches[20:40]:
        trainer.step(batch)
    for node in cluster.nodes:
        data = wait_until(node.socket, lambda seen: seen["hub"]["state"] != "connected")
        assert data["hub"]["error"] is not None
        assert data["node"]["state"] == "DEGRADED", "work goes on, and the screen says what is missing"
        assert {worker["state"] for worker in data["workers"]} == {"running"}
    cluster.restart_hub()
    for batch in batches[40:]:
        trainer.step(batch)
    for node in cluster.nodes:
        wait_until(node.socket, lambda seen: seen["hub"]["state"] == "connected")
    job = trainer.job
    assert job is not None
    expected = job.units_done * 1000
    assert expected == 60 * 4 * 4 * 1000, "60 steps, 4 ranks, 4 micro-batches each"
    trainer.close()
    deadline = time.monotonic() + 30
    while (micro := sum(node.confirmed_micro for node in fresh.query_mesh().nodes)) < expected:
        assert time.monotonic() < deadline, f"{micro} of {expected} micro-credits"
        time.sleep(0.1)
    assert micro == expected
    assert fresh.query_mesh().generation > generation


def test_a_stopped_worker_is_noticed(fresh: Session) -> None:
    """SIGSTOP: the socket stays open, but nobody answers any more."""
    atlas = cluster_of(fresh).nodes[0].socket
    trainer = start(fresh)
    trainer.step(models.points(1)[0])
    (victim, *_) = worker_pids(snapshot(atlas))
    os.kill(victim, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLostError, match="not a byte came from it"):
            step_for_ever(trainer)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


def test_shutdown_leaves_nothing_behind() -> None:
    opened = open_session("local", workers=2, nodes=1)
    cluster = cluster_of(opened)
    folder = cluster.folder
    pids = [cluster.hub.pid, *(node.child.pid for node in cluster.nodes)]
    trainer = start_small(opened)
    trainer.step(models.points(1)[0])
    pids += worker_pids(snapshot(cluster.nodes[0].socket))
    opened.close()
    assert len(pids) == 4
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not folder.exists()


def start_small(opened: Session) -> Trainer:
    model = DistributedModel(models.MLP())
    parallel = ParallelConfig(data_parallel=2)
    return Trainer(model, parallel=parallel, loss=models.classify, progress=False, session=opened)
