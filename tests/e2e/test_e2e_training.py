"""The promise, over real processes: the same numbers as one process, or an error that names the thing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import e2e_models as models
import pytest
import torch
from torch import nn

from distensor.core import ParallelConfig
from distensor.core.errors import (
    BatchError,
    ConfigError,
    DivergedError,
    JobFailedError,
    PlacementError,
    WorkerFailedError,
)
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Session, StepResult, Trainer
from distensor.transport import LocalMeeting

SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)
DP2_PP2 = ParallelConfig(data_parallel=2, pipeline_parallel=2)
SLOW = pytest.mark.slow  # threads in one process do the same in tests/training


def trainer_for(
    mesh: Session, module: nn.Module, stages: list[list[str]] | None, parallel: ParallelConfig, **options: Any
) -> Trainer:
    mapping = None if stages is None else StageMapping(stages)
    model = DistributedModel(copy.deepcopy(module), stage_mapping=mapping)
    options = {"optimizer": "adamw", "lr": 1e-2, "progress": False, "session": mesh, **options}
    if options["optimizer"] == "adamw":
        options.setdefault("optimizer_options", {"eps": 1e-6})
    return Trainer(model, parallel=parallel, **options)


def close_to(losses: list[float]) -> Any:
    return pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("stages", "parallel", "options"),
    [
        (None, ParallelConfig(), {}),
        (None, ParallelConfig(data_parallel=3), {"micro_batches": 2}),
        (models.MLP_TWO, ParallelConfig(pipeline_parallel=2), {"schedule": "gpipe"}),
        pytest.param(models.MLP_TWO, DP2_PP2, {}, marks=SLOW),
        pytest.param(models.MLP_TWO, DP2_PP2, {"schedule": "gpipe", "micro_batches": 3}, marks=SLOW),
        (models.MLP_TWO, ParallelConfig(data_parallel=2, pipeline_parallel=2, order="pp-dp-tp-cp"), {}),
        (models.MLP_FOUR, ParallelConfig(pipeline_parallel=4), {"micro_batches": 2}),
        (models.MLP_FOUR, ParallelConfig(pipeline_parallel=2), {"micro_batches": 4}),
        pytest.param(models.MLP_FOUR, ParallelConfig(pipeline_parallel=2), {"micro_batches": 3}, marks=SLOW),
        pytest.param(models.MLP_FOUR, ParallelConfig(data_parallel=2), {"micro_batches": 2}, marks=SLOW),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelConfig) else None,
)
def test_adamw_training_equals_one_process(
    mesh: Session, stages: list[list[str]] | None, parallel: ParallelConfig, options: dict[str, Any]
) -> None:
    module, batches = models.MLP(), models.points(5, rows=7)
    expected, losses, norms = models.train_here(module, batches, ADAMW, models.classify)
    with trainer_for(mesh, module, stages, parallel, loss=models.classify, **options) as trainer:
        history = trainer.fit(batches)
        state = trainer.state_dict()
    assert history.losses == close_to(losses)
    assert [step.grad_norm for step in history.steps] == close_to(norms)
    assert models.worst_difference(state, expected) <= 1e-5
    assert models.worst_difference(dict(trainer.model.module.named_parameters()), expected) <= 1e-5


@pytest.mark.parametrize("norm_type", [1.0, pytest.param("inf", marks=SLOW)])
def test_accumulated_batches_of_other_lengths_are_one_batch(mesh: Session, norm_type: float | str) -> None:
    """Rows with few and with many real labels; the last window is one batch short and is stepped all the same."""
    module = models.TiedLM()
    long, short, odd = models.texts(3, rows=4)
    short = {name: tensor[:3, :5] for name, tensor in short.items()}
    reference = copy.deepcopy(module)
    optimizer = SGD(reference.parameters())
    losses, norms = [], []
    for window in ([long, short], [odd]):
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in window]
        loss = sum(reference(**b) * count for b, count in zip(window, counts, strict=True)) / sum(counts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type=float(norm_type))))
        optimizer.step()
        losses.append(float(loss.detach()))
    options = {"optimizer": "sgd", "lr": 0.1, "clip_norm": 0.05, "norm_type": norm_type, "accumulate": 2}
    with trainer_for(mesh, module, models.TIED_TWO, DP2_PP2, micro_batches=2, **options) as trainer:
        history = trainer.fit([long, short, odd])
        assert history.losses == close_to(losses)
        assert [step.grad_norm for step in history.steps] == close_to(norms)
        assert models.worst_difference(trainer.state_dict(), reference) <= 1e-5


def test_sgd_with_momentum_equals_one_process(mesh: Session) -> None:
    module, batches = models.MLP(), models.points(5)
    options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    expected, losses, _ = models.train_here(module, batches, partial(SGD, **options), models.classify)
    with trainer_for(
        mesh,
        module,
        models.MLP_TWO,
        DP2_PP2,
        loss=models.classify,
        optimizer="sgd",
        lr=0.1,
        optimizer_options=options,
    ) as trainer:
        assert trainer.fit(batches).losses == close_to(losses)
        assert models.worst_difference(trainer.state_dict(), expected) <= 1e-5


def test_tied_weights_and_uneven_tokens_equal_one_process(mesh: Session) -> None:
    module, batches = models.TiedLM(), models.texts(5, rows=5)
    expected, losses, norms = models.train_here(module, batches, ADAMW)
    with trainer_for(mesh, module, models.TIED_TWO, DP2_PP2, micro_batches=2) as trainer:
        history = trainer.fit(batches)
        state = trainer.state_dict()
    assert history.losses == close_to(losses)
    assert [step.grad_norm for step in history.steps] == close_to(norms)
    assert [step.tokens for step in history.steps] == [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    assert models.worst_difference(state, expected) <= 1e-5
    assert "head.weight" not in state, "a tied weight is kept once"


@pytest.fixture(scope="module")
def tied(mesh: Session) -> Iterator[Trainer]:
    """A running job that several tests share; none of them updates its weights."""
    with trainer_for(mesh, models.TiedLM(), models.TIED_TWO, DP2_PP2, micro_batches=2) as trainer:
        yield trainer


def test_every_gradient_equals_one_process(tied: Trainer) -> None:
    parity = tied.check_parity(models.texts(1)[0])
    assert parity.max_relative_difference <= 1e-6
    assert set(parity.gradient_differences) == {
        "embed.weight", "first.weight", "first.bias", "second.weight", "second.bias",
    }  # fmt: skip


def test_a_micro_batch_without_a_real_token_counts_nothing(tied: Trainer) -> None:
    (batch,) = models.texts(1, rows=4)
    batch["labels"][1:3] = -100
    assert tied.check_parity(batch).max_relative_difference <= 1e-6


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batches_smaller_than_the_cut_equal_one_process(tied: Trainer, rows: int) -> None:
    assert tied.check_parity(models.texts(1, rows=rows)[0]).max_relative_difference <= 1e-6


@pytest.mark.parametrize(("rows", "length"), [(4, 9), (7, 5), (2, 12), (3, 3)])
def test_batches_may_change_rows_and_length(tied: Trainer, rows: int, length: int) -> None:
    assert tied.check_parity(models.texts(1, rows=rows, length=length)[0]).max_relative_difference <= 1e-6


def test_clipping_uses_the_norm_of_the_whole_model(mesh: Session) -> None:
    module, batches = models.TiedLM(), models.texts(4)
    with torch.no_grad():
        module.second.weight.mul_(30)  # the stages' norms differ widely
    expected, losses, norms = models.train_here(module, batches, SGD, clip_norm=0.5)
    assert max(norms) > 0.5
    with trainer_for(mesh, module, models.TIED_TWO, DP2_PP2, optimizer="sgd", lr=0.1, clip_norm=0.5) as trainer:
        history = trainer.fit(batches)
        state = trainer.state_dict()
    assert history.losses == close_to(losses)
    assert [step.grad_norm for step in history.steps] == close_to(norms)
    assert models.worst_difference(state, expected) <= 1e-5


def test_frozen_parts_stay_as_they_are(mesh: Session) -> None:
    module, batches = models.MLP(), models.points(3)
    for parameter in module.first.parameters():
        parameter.requires_grad_(False)
    for layer in (module.layers[0], module.layers[1]):
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
    expected, losses, _ = models.train_here(module, batches, ADAMW, models.classify)
    with trainer_for(mesh, module, models.MLP_TWO, DP2_PP2, loss=models.classify) as trainer:
        assert trainer.fit(batches).losses == close_to(losses)
        state = trainer.state_dict()
    assert torch.equal(state["first.weight"], module.first.weight)
    assert models.worst_difference(state, expected) <= 1e-5


def test_learning_rate_changes_reach_the_workers(mesh: Session) -> None:
    module, (first, second, third) = models.MLP(), models.points(3)
    with trainer_for(mesh, module, models.MLP_TWO, DP2_PP2, loss=models.classify, optimizer="sgd", lr=0.1) as trainer:
        trainer.step(first)
        before = trainer.state_dict()
        trainer.lr = 0.0
        trainer.step(second)
        assert all(torch.equal(before[name], value) for name, value in trainer.state_dict().items())
        trainer.lr = 0.2
        gradients = trainer.gradients(third)
        result = trainer.step(third)
        after = trainer.state_dict()
    assert result.lr == 0.2
    for name, gradient in gradients.items():
        assert torch.allclose(after[name], before[name] - 0.2 * gradient, atol=1e-6)


def test_a_schedule_is_asked_for_each_step(mesh: Session) -> None:
    module, batches = models.MLP(), models.points(3)
    with trainer_for(
        mesh,
        module,
        None,
        ParallelConfig(),
        loss=models.classify,
        lr_schedule=lambda step: 0.1 / step,
    ) as trainer:
        history = trainer.fit(batches)
    assert [step.lr for step in history.steps] == [0.1, 0.05, pytest.approx(0.1 / 3)]


def test_evaluate_equals_one_process_and_changes_nothing(tied: Trainer) -> None:
    module, batches = tied.model.module, models.texts(3, rows=5)
    weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    before = tied.state_dict()
    with torch.no_grad():
        losses = [float(module(**batch)) for batch in batches]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert tied.evaluate(batches) == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in tied.state_dict().items())


def test_a_stage_of_any_size_loads(mesh: Session) -> None:
    """Far over the 4 MiB that a default gRPC message holds, and over one part of a data frame."""
    module = models.TiedLM(vocabulary=20_000, width=256)  # 20.5 MB of embedding
    (batch,) = models.texts(1, rows=2, length=4)
    with trainer_for(mesh, module, models.TIED_TWO, ParallelConfig(pipeline_parallel=2)) as trainer:
        assert trainer.check_parity(batch).max_relative_difference <= 1e-6


def test_a_loss_that_is_no_number_is_an_error_and_no_update(mesh: Session) -> None:
    (good,) = models.points(1)
    bad = (torch.full_like(good[0], float("nan")), good[1])
    module = models.MLP()
    with trainer_for(mesh, module, models.MLP_TWO, DP2_PP2, loss=models.classify) as trainer:
        with pytest.raises(DivergedError, match=r"step 1.*nan"):
            trainer.step(bad)
        state = trainer.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in module.named_parameters())
        assert trainer.steps_done == 0
        assert trainer.step(good).step == 1


def test_more_ranks_than_workers_names_both_numbers(mesh: Session) -> None:
    free = mesh.query_mesh().available_workers
    parallel = ParallelConfig(data_parallel=free + 1)
    with (
        trainer_for(mesh, models.MLP(), None, parallel, loss=models.classify) as trainer,
        pytest.raises(PlacementError, match=rf"{free + 1}.*{free}"),
    ):
        trainer.step(models.points(1)[0])
    assert mesh.query_mesh().available_workers == free


def test_workers_are_free_again_after_a_job(mesh: Session) -> None:
    free = mesh.query_mesh().available_workers
    with trainer_for(mesh, models.MLP(), models.MLP_TWO, DP2_PP2, loss=models.classify) as trainer:
        trainer.step(models.points(1)[0])
        assert mesh.query_mesh().available_workers == free - 4
        # Workers on this machine, and one user: nothing of the job goes through TLS, where the system allows that.
        assert trainer._job is not None
        links = trainer._job._connection.stats().values()
        assert {link.local for link in links} == {LocalMeeting().unavailable() is None}
    deadline = mesh.clock.monotonic() + 30
    while mesh.query_mesh().available_workers < free:
        assert mesh.clock.monotonic() < deadline
        mesh.clock.sleep(0.05)
    with pytest.raises(JobFailedError, match="has ended"):
        trainer.step(models.points(1)[0])


def test_an_empty_loader_is_a_clear_error(mesh: Session) -> None:
    with (
        trainer_for(mesh, models.MLP(), None, ParallelConfig(), loss=models.classify) as trainer,
        pytest.raises(BatchError, match="no batch"),
    ):
        trainer.fit([])


def test_weights_are_saved_and_loaded(mesh: Session, tmp_path: Any) -> None:
    batches = models.texts(2)
    path = str(tmp_path / "weights.safetensors")
    with trainer_for(mesh, models.TiedLM(), models.TIED_TWO, DP2_PP2) as trainer:
        trainer.fit(batches)
        trainer.save(path)
        loss = trainer.evaluate(batches)
    with trainer_for(mesh, models.TiedLM(), models.TIED_TWO, DP2_PP2) as other:
        assert other.evaluate(batches) != pytest.approx(loss, rel=1e-6)
        other.load(path)
        assert other.evaluate(batches) == pytest.approx(loss, rel=1e-6)


def test_options_that_are_not_built_are_refused_before_anything_starts(mesh: Session) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=2"):
        trainer_for(mesh, models.MLP(), None, ParallelConfig(tensor_parallel=2), loss=models.classify)


class Dropping(models.MLP):
    """The same with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.drop(inputs))


def test_parity_of_a_model_with_dropout_says_why_it_cannot_be(mesh: Session) -> None:
    (batch,) = models.points(1)
    with trainer_for(mesh, Dropping(), None, ParallelConfig(), loss=models.classify) as trainer:
        with pytest.raises(ConfigError, match=r"drop draws random numbers"):
            trainer.check_parity(batch)
        assert trainer.step(batch).step == 1
    silent = Dropping()
    silent.drop.p = 0.0
    with trainer_for(mesh, silent, None, ParallelConfig(), loss=models.classify) as trainer:
        assert trainer.check_parity(batch).max_relative_difference <= 1e-6


def test_a_second_thread_is_told_that_the_trainer_is_in_use(mesh: Session) -> None:
    (batch,) = models.points(1)
    told: list[BaseException] = []

    def intrude(_: StepResult) -> None:
        def use() -> None:
            try:
                trainer.state_dict()
            except ConfigError as error:
                told.append(error)

        thread = threading.Thread(target=use)
        with trainer._standing.exclusive():
            thread.start()
            thread.join()

    with trainer_for(mesh, models.MLP(), None, ParallelConfig(), loss=models.classify) as trainer:
        trainer.fit([batch], on_step=intrude)
    assert "another thread" in str(told[0])


def test_an_error_on_a_worker_names_rank_operation_and_module(mesh: Session) -> None:
    (batch,) = models.texts(1)
    with trainer_for(mesh, models.TiedLM(), models.TIED_TWO, DP2_PP2) as trainer:
        trainer.step(batch)
        batch["input_ids"][0, 0] = 99  # the vocabulary has 17
        with pytest.raises(WorkerFailedError, match=r"rank \d on node '(atlas|bolt)'.*embedding.*embed"):
            trainer.step(batch)
        with pytest.raises(JobFailedError, match="has ended"):
            trainer.step(batch)
