"""What counts, and how often: rows and tokens, micro-batches, bytes of gradients, norms of stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.core.errors import BatchError
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer

DP2 = ParallelConfig(data_parallel=2)
PP2 = ParallelConfig(pipeline_parallel=2)


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    with thread_session(2) as session:
        yield session


class Regression(nn.Module):
    """x (rows, 4), y (rows,) -> mean squared error over the rows."""

    def __init__(self, width: int = 6, depth: int = 1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return (self.last(h).squeeze(-1) - y).square().mean()  # type: ignore[no-any-return]


def rows_of(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, 4, generator=generator), "y": torch.randn(count, generator=generator)}


def trainer_of(session: Any, module: nn.Module, parallel: ParallelConfig = DP2, **options: Any) -> Trainer:
    stages = options.pop("stages", None)
    model = DistributedModel(module, stage_mapping=None if stages is None else StageMapping(stages))
    options = {"optimizer": "sgd", "lr": 0.1, "session": session, "progress": False, **options}
    return Trainer(model, parallel=parallel, **options)


def assert_close(ours: Any, reference: nn.Module) -> None:
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_fewer_rows_than_replicas_and_an_odd_end_of_the_data(two: Any) -> None:
    """Nine rows in batches of two: the last batch is one row, which one of two replicas trains on alone."""
    module, whole = Regression(), rows_of(9)
    batches = [{name: value[at : at + 2] for name, value in whole.items()} for at in range(0, 9, 2)]
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = reference(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with trainer_of(two, module) as trainer:
        history = trainer.fit(batches)
        with pytest.raises(BatchError, match="holds no batch"):
            trainer.fit([])
        with pytest.raises(BatchError, match="batch is 0"):
            trainer.step(rows_of(0))
        assert trainer.step(rows_of(3)).step == 6, "a batch that cannot be trained on ends nothing"
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.tokens for step in history.steps] == [2, 2, 2, 2, 1]


def test_accumulated_batches_are_weighted_by_their_rows(two: Any) -> None:
    module = Regression()
    small, large = rows_of(3, seed=1), rows_of(9, seed=2)
    reference = copy.deepcopy(module)
    reference(**{name: torch.cat([small[name], large[name]]) for name in small}).backward()
    with trainer_of(two, module, micro_batches=2) as trainer:
        assert_close(trainer.gradients(small, large), reference)


def test_gradient_bytes_of_a_step_do_not_grow_with_the_micro_batches(two: Any) -> None:
    """The same 16 rows in 1, 4 and 8 batches."""
    whole = rows_of(16)
    sent = {}
    with trainer_of(two, Regression(width=64), micro_batches=2) as trainer:
        for parts in (1, 4, 8):
            batches = [dict(zip(whole, pair, strict=True)) for pair in zip(*(v.chunk(parts) for v in whole.values()))]  # noqa: B905
            before = two.planes[0].stats()[1].bytes_sent
            trainer.step(*batches)
            sent[parts] = two.planes[0].stats()[1].bytes_sent - before
    weights = sum(p.numel() * 4 for p in Regression(width=64).parameters())
    assert sent[1] >= weights
    assert all(abs(bytes_ - sent[1]) <= 0.05 * sent[1] for bytes_ in sent.values()), sent


def test_many_small_weights_travel_in_as_few_messages_as_one_large(two: Any) -> None:
    class Scales(nn.Module):
        def __init__(self, count: int, size: int) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(size) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([(x.sum() * scale).mean() for scale in self.scales]).mean()

    counts = []
    for count, size in ((200, 64), (1, 200 * 64)):
        with trainer_of(two, Scales(count, size), loss_weight="rows") as trainer:
            trainer.step(torch.ones(4, 2))
            before = two.planes[0].stats()[1]
            trainer.step(torch.ones(4, 2))
            after = two.planes[0].stats()[1]
        counts.append((after.messages_sent - before.messages_sent, after.bytes_sent - before.bytes_sent))
    (many, many_bytes), (one, one_bytes) = counts
    assert many == one
    assert many_bytes <= 1.1 * one_bytes


@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
def test_two_stages_are_clipped_by_the_norm_of_the_model(two: Any, norm_type: Any) -> None:
    """The gradients of the stages differ about a hundredfold."""
    module = Regression(depth=2)
    with torch.no_grad():
        module.last.weight.mul_(0.01)
    reference = copy.deepcopy(module)
    reference(**rows_of(8)).backward()
    parts = [[p for n, p in reference.named_parameters() if n.startswith(("first", "layers.0")) is early]
             for early in (True, False)]  # fmt: skip
    kind = float(norm_type)
    alone = [float(torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None], kind)) for part in parts]
    assert max(alone) > 20 * min(alone)
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0, kind))
    before = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    stages = [["first", "layers.0"], ["layers.1", "last"]]
    with trainer_of(two, module, PP2, stages=stages, clip_norm=1.0, norm_type=norm_type, lr=1.0) as trainer:
        assert trainer.step(rows_of(8)).grad_norm == pytest.approx(norm, rel=1e-6)
        updated = trainer.state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(before[name] - updated[name], parameter.grad, rtol=2e-4, atol=2e-5)


class Gate(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


class Frozen(nn.Module):
    """A frozen layer, one without parameters, another frozen one, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Linear(4, 6).requires_grad_(False)
        self.gate = Gate()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(self.gate(self.embed(x))))
        return (self.last(h).squeeze(-1) - y).square().mean()  # type: ignore[no-any-return]


def test_stages_without_anything_to_train_take_part() -> None:
    module = Frozen()
    reference = copy.deepcopy(module)
    optimizer = torch.optim.SGD(reference.last.parameters(), lr=0.1)
    norms = []
    for seed in range(3):
        optimizer.zero_grad()
        reference(**rows_of(5, seed)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.last.parameters(), 0.1)))
        optimizer.step()
    stages = [["embed"], ["gate"], ["frozen"], ["last"]]
    parallel = ParallelConfig(pipeline_parallel=4)
    with thread_session(4) as session, trainer_of(session, module, parallel, stages=stages, clip_norm=0.1) as trainer:
        history = trainer.fit([rows_of(5, seed) for seed in range(3)])
        state, gradients = trainer.state_dict(), trainer.gradients(rows_of(5))
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert set(gradients) == {"last.weight", "last.bias"}
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)
