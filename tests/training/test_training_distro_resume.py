"""Replicas that keep something for themselves, saved and gone on with: on the same mesh to the bit, and on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_distro import SPARSE, batches, model_for, squared
from thread_mesh import thread_session
from torch import Tensor

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError
from distensor.training import Trainer
from distensor.transport.driver import Command

FLAT = ParallelConfig(data_parallel=2)
LOCAL = {"every": 3}
WAYS: dict[str, dict[str, Any]] = {
    "distro": {"sync": "distro", "sync_options": SPARSE},
    "delayed": {"sync": "distro", "sync_options": {**SPARSE, "delay": True}},
    "demo": {"sync": "demo", "sync_options": SPARSE},
    "diloco": {"sync": "diloco", "sync_options": LOCAL},
    "sparseloco": {"sync": "sparseloco", "sync_options": {**LOCAL, **SPARSE}},
}


@contextmanager
def trainer_on(parallel: ParallelConfig, folder: Path | None, way: str, **options: Any) -> Iterator[tuple[Any, Any]]:
    given = {"lr": 0.02, "optimizer_options": {"eps": 1e-2}, **WAYS[way], **options}
    with thread_session(parallel.world_size) as session:
        trainer = Trainer(
            model_for(parallel), parallel=parallel, loss=squared, session=session, checkpoint=folder, **given
        )
        try:
            yield session, trainer
        finally:
            trainer.close()


def steps(trainer: Trainer, data: Sequence[Any]) -> list[float]:
    return [trainer.step(batch).loss for batch in data]


def own(session: Any, rank: int, field: str) -> dict[str, Tensor]:
    state = session.connections[-1].engines[rank].optimizer_state()
    return {key: fields[field].clone() for key, fields in state.items()}


def weights(session: Any, rank: int) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in session.connections[-1].engines[rank]._weights.updated.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("way", WAYS)
def test_each_replica_goes_on_with_its_own(tmp_path: Path, way: str) -> None:
    """The fourth of seven steps: between two exchanges of those that take steps of their own."""
    data = batches(7)
    with trainer_on(FLAT, tmp_path, way) as (session, trainer):
        steps(trainer, data[:4])
        trainer.save_checkpoint()
        field = "local" if "loco" in way else "residual"
        ours = [own(session, rank, field) for rank in (0, 1)]
        assert not same(*ours)
        unbroken = steps(trainer, data[4:])
        expected = trainer.state_dict()
        replicas = weights(session, 0), weights(session, 1)
        assert same(*replicas) != ("loco" in way)  # the seventh step is again between two exchanges
    with trainer_on(FLAT, tmp_path, way) as (session, trainer):
        assert trainer.resume() == 4
        trainer.evaluate(data[:1])  # places the job
        assert all(same(ours[rank], own(session, rank, field)) for rank in (0, 1))
        assert steps(trainer, data[4:]) == unbroken
        assert same(dict(trainer.state_dict()), dict(expected))
        assert all(same(replicas[rank], weights(session, rank)) for rank in (0, 1))


@pytest.mark.parametrize("way", ["distro", "diloco", "sparseloco"])
def test_on_another_mesh_it_is_the_same_run(tmp_path: Path, way: str) -> None:
    data = batches(7)
    with trainer_on(ParallelConfig(data_parallel=2, tensor_parallel=2), tmp_path, way) as (_, trainer):
        steps(trainer, data[:4])
        trainer.save_checkpoint()
        unbroken = steps(trainer, data[4:])
    with trainer_on(ParallelConfig(data_parallel=2, pipeline_parallel=2), tmp_path, way) as (_, trainer):
        trainer.resume()
        assert steps(trainer, data[4:]) == pytest.approx(unbroken, rel=1e-4)


@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_with_more_or_fewer_replicas_nothing_that_waits_is_lost(tmp_path: Path, replicas: int) -> None:
    data = batches(4, rows=12)
    with trainer_on(FLAT, tmp_path, "distro") as (session, trainer):
        steps(trainer, data[:3])
        trainer.save_checkpoint()
        waiting = [own(session, rank, "residual") for rank in (0, 1)]
    with trainer_on(ParallelConfig(data_parallel=replicas), tmp_path, "distro") as (session, trainer):
        trainer.resume()
        trainer.evaluate(data[:1])
        now = [own(session, rank, "residual") for rank in range(replicas)]
        assert torch.isfinite(torch.tensor(steps(trainer, data[3:]))).all()
    for key in waiting[0]:
        before = torch.stack([each[key] for each in waiting]).mean(0)
        assert torch.allclose(torch.stack([each[key] for each in now]).mean(0), before, atol=1e-6)
    if replicas == 4:
        assert same(now[0], waiting[0])
        assert same(now[3], waiting[1])


def test_another_way_to_agree_is_refused(tmp_path: Path) -> None:
    with trainer_on(FLAT, tmp_path, "distro") as (_, trainer):
        steps(trainer, batches(2))
        trainer.save_checkpoint()
    with (
        trainer_on(FLAT, tmp_path, "diloco") as (_, trainer),
        pytest.raises(ConfigError, match=r"keeps no 'residual'"),
    ):
        trainer.resume()


@pytest.mark.parametrize("way", ["diloco", "sparseloco"])
def test_between_exchanges_everybody_sees_what_all_have_in_common(way: str) -> None:
    data = batches(3)
    with trainer_on(FLAT, None, way) as (session, trainer):
        trainer.pull()
        start = {key: value.clone() for key, value in trainer.state_dict().items()}
        steps(trainer, data[:2])
        assert not same(weights(session, 0), weights(session, 1))
        assert same(dict(trainer.state_dict()), start)
        before = weights(session, 1)
        assert trainer.check_parity(data[0]).max_relative_difference <= 1e-6
        assert same(before, weights(session, 1))
        steps(trainer, data[2:])
        assert same(weights(session, 0), weights(session, 1))
        assert not same(dict(trainer.state_dict()), start)


@pytest.mark.parametrize("way", ["diloco", "sparseloco"])
def test_the_last_step_of_a_fit_exchanges(way: str) -> None:
    with trainer_on(FLAT, None, way, ema=0.5) as (session, trainer):
        trainer.fit(batches(5))
        assert Command.EXCHANGE not in session.connections[-1].commands
        assert same(weights(session, 0), weights(session, 1))
        averages = [dict(session.connections[-1].engines[rank]._updater.averages()) for rank in (0, 1)]
        assert same(*averages)


@pytest.mark.parametrize("way", ["distro", "diloco", "sparseloco"])
def test_data_that_does_not_know_its_length_ends_with_an_exchange_too(way: str) -> None:
    with trainer_on(FLAT, None, way) as (session, trainer):
        trainer.fit(iter(batches(5)))
        local = "loco" in way
        assert session.connections[-1].commands.count(Command.EXCHANGE) == local
        assert same(weights(session, 0), weights(session, 1))
        assert same(
            {key.partition("/")[2]: value for key, value in weights(session, 0).items()}, dict(trainer.state_dict())
        )


@pytest.mark.parametrize("way", ["diloco", "sparseloco"])
def test_weights_from_outside_are_where_all_go_on(way: str, tmp_path: Path) -> None:
    with trainer_on(FLAT, None, way) as (session, trainer):
        steps(trainer, batches(2))
        trainer.save(str(tmp_path / "w.safetensors"))
        steps(trainer, batches(2))
        trainer.load(str(tmp_path / "w.safetensors"))
        assert same(weights(session, 0), weights(session, 1))
        assert {key.partition("/")[2]: value for key, value in weights(session, 0).items()}.keys() <= set(
            trainer.state_dict()
        )
