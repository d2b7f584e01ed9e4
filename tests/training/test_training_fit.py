"""What `fit`, sessions and files do with the user's words and data, without a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distensor.core import SYSTEM_CLOCK, ParallelConfig
from distensor.core.errors import BatchError, ConfigError, StoreError, WorkerLostError
from distensor.nn import DistributedModel
from distensor.training import Session, StepResult, Trainer
from distensor.training.files import load_weights, save_weights


class Recorder(Trainer):
    """A trainer whose steps only count."""

    def step(self, *batches: Any, total_steps: int | None = None) -> StepResult:
        self._step += 1
        seen.append((batches[0] if len(batches) == 1 else batches, total_steps))
        return StepResult(
            step=self._step, loss=1.0, tokens=1, grad_norm=1.0, lr=0.1, bytes_sent=0, bytes_received=0,
            seconds=1.0, compute_seconds=1.0, sync_seconds=0.0, wait_seconds=0.0,
        )  # fmt: skip


seen: list[tuple[Any, int | None]] = []


@pytest.fixture
def trainer() -> Trainer:
    seen.clear()
    return Recorder(DistributedModel(nn.Linear(2, 1)), parallel=ParallelConfig(), progress=False)


def test_every_batch_of_every_epoch_is_taken(trainer: Trainer) -> None:
    assert len(trainer.fit([1, 2], epochs=2)) == 4
    assert seen == [(1, 4), (2, 4), (1, 4), (2, 4)]


def test_no_batch_is_taken_that_is_not_used(trainer: Trainer) -> None:
    data = iter(range(10))
    trainer.fit(data, max_steps=3)
    assert next(data) == 3


def test_a_generator_cannot_serve_two_epochs(trainer: Trainer) -> None:
    with pytest.raises(BatchError, match=r"epochs=2.*generator"):
        trainer.fit((batch for batch in range(3)), epochs=2)
    assert not seen, "nothing was trained"


def test_a_loader_that_runs_dry_is_named(trainer: Trainer) -> None:
    class Once:
        left = iter([1])

        def __iter__(self) -> Iterator[int]:
            yield from self.left

    with pytest.raises(BatchError, match="epoch 2 of 2 holds no batch"):
        trainer.fit(Once(), epochs=2)


def accumulating(size: int) -> Trainer:
    seen.clear()
    model = DistributedModel(nn.Linear(2, 1))
    return Recorder(model, parallel=ParallelConfig(), progress=False, accumulate=size)


def test_the_last_window_of_an_epoch_is_stepped() -> None:
    assert len(accumulating(2).fit([1, 2, 3], epochs=2)) == 4
    assert seen == [((1, 2), 4), (3, 4), ((1, 2), 4), (3, 4)]


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 10), (3, 30), (3, 28)])
def test_steps_and_their_total_count_windows(accumulate: int, batches: int) -> None:
    history = accumulating(accumulate).fit(range(batches))
    assert [step.step for step in history.steps] == list(range(1, 11))
    assert {total for _, total in seen} == {10}


def test_max_steps_counts_optimizer_steps_and_takes_no_batch_more() -> None:
    data = iter(range(10))
    accumulating(3).fit(data, max_steps=2)
    assert next(data) == 6


def test_a_step_without_a_batch_is_an_error() -> None:
    with pytest.raises(BatchError, match="at least one batch"):
        Trainer(DistributedModel(nn.Linear(2, 1)), parallel=ParallelConfig()).step()


@pytest.mark.parametrize(("keyword", "value"), [("epochs", 0), ("epochs", "2"), ("max_steps", 0), ("max_steps", True)])
def test_wrong_counts_are_named(trainer: Trainer, keyword: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{keyword}={value!r}"):
        trainer.fit([1], **{keyword: value})


def test_options_that_torch_refuses_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="sgd"):
        Trainer(
            DistributedModel(nn.Linear(2, 1)),
            parallel=ParallelConfig(),
            optimizer="sgd",
            optimizer_options={"nesterov": True},
        )


class Part:
    """A job, a client or a cluster that a session closes."""

    def __init__(self, name: str, closed: list[str], error: BaseException | None = None) -> None:
        self.name, self.closed, self.error, self.failure = name, closed, error, ""

    def close(self) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


def session_of(closed: list[str]) -> Session:
    return Session(
        client=cast("Any", Part("client", closed)), cluster=cast("Any", Part("cluster", closed)), clock=SYSTEM_CLOCK
    )


def test_a_session_closes_everything_whatever_fails() -> None:
    closed: list[str] = []
    opened = session_of(closed)
    opened.attach(Part("first", closed))
    opened.attach(Part("second", closed, WorkerLostError("gone")))
    with pytest.raises(WorkerLostError):
        opened.close()
    opened.close()
    assert closed == ["second", "first", "client", "cluster"]


def test_failed_jobs_give_their_workers_back_when_the_next_starts() -> None:
    closed: list[str] = []
    opened = session_of(closed)
    failed, other = Part("failed", closed), Part("other", closed)
    opened.attach(failed)
    failed.failure = "gone"
    opened.attach(other)
    opened.attach(other)
    assert closed == ["failed"]
    opened.detach(other)
    opened.close()
    assert closed == ["failed", "client", "cluster"]


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    module, other = nn.Linear(2, 3), nn.Linear(2, 3)
    save_weights(tmp_path / "w", module.state_dict())
    load_weights(tmp_path / "w", other)
    assert torch.equal(module.weight, other.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["w"], "nothing partial is left"


@pytest.mark.parametrize(
    "tensors",
    [
        {"bias": torch.ones(3)},
        {"bias": torch.ones(3), "weight": torch.ones(3, 2), "more": torch.ones(1)},
        {"bias": torch.ones(3), "weight": torch.ones(2, 3)},
        {"bias": torch.ones(3), "weight": torch.ones(3, 2).double()},
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    module = nn.Linear(2, 3)
    before = module.bias.detach().clone()
    save_file(tensors, tmp_path / "w")
    with pytest.raises(ConfigError, match="w"):
        load_weights(tmp_path / "w", module)
    assert torch.equal(module.bias, before)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"nothing")
    for name in ("bad", "missing"):
        with pytest.raises(StoreError, match=name):
            load_weights(tmp_path / name, nn.Linear(2, 3))
    with pytest.raises(StoreError, match="nowhere"):
        save_weights(tmp_path / "nowhere" / "w", {"a": torch.ones(1)})
