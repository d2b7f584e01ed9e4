"""What may cross from one stage to the next: every kind of tensor, bit by bit, with its gradient where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from node_kit import executor, on_all, planes_of
from torch import Tensor, nn

from distensor.core.schedules import Schedule, actions_of_rank
from distensor.program import Cut, StageRunner, capture, cut
from distensor.transport import DataPlane


class First(nn.Module):
    """ids (rows, length) -> one tensor of every kind, all of which depend on a weight and so must be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embed(ids)
        return (
            hidden,
            hidden.argmax(-1),
            hidden[..., 1] > 0,
            torch.view_as_complex(hidden.unflatten(-1, (3, 2))),
            hidden.to(torch.bfloat16) * 2,
            hidden.mean(),
            hidden[:, 0, :4][:0],
            torch.view_as_complex(torch.stack([hidden.argmax(-1) * 0.5, ids + 0.25], -1)),
        )


class Second(nn.Module):
    """Everything that `First` makes -> (rows, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(
        self,
        hidden: Tensor,
        numbers: Tensor,
        mask: Tensor,
        turned: Tensor,
        half: Tensor,
        mean: Tensor,
        empty: Tensor,
        angles: Tensor,
    ) -> Tensor:
        x = (hidden * self.scale).sum(-1) * mask + numbers * 0.01 + mean
        x = x + torch.view_as_real(turned * turned).sum((-1, -2)) + half.float().sum(-1) + empty.sum()
        return x + torch.view_as_real(angles).sum(-1)


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = First()
        self.second = Second()

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(*self.first(ids)).square().mean()


class Watched:
    """A runner that remembers what went in and what came out."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self.given: list[dict[str, Tensor]] = []
        self.made: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, inputs: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        self.given.append(dict(inputs))
        self.made.append(self._runner.forward(inputs, **options))
        return self.made[-1]


def ids(rows: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(rows))}


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(2) as opened:
        yield opened


@pytest.fixture(scope="module")
def pieces() -> Cut:
    return cut(capture(Kinds(), ids(4)), {"first": 0, "second": 1})


def test_every_kind_of_tensor_crosses_bit_by_bit(planes: dict[int, DataPlane], pieces: Cut) -> None:
    watched = [Watched(StageRunner(pieces.programs[rank], pieces.weights(rank))) for rank in range(2)]
    batches = [ids(2), ids(5)]

    def of_rank(rank: int) -> None:
        actions = actions_of_rank(Schedule.ONE_F_ONE_B, rank=rank, ranks=2, stages=2, micro_batches=2)
        runners: Any = {rank: watched[rank]}
        executor(planes[rank], rank, 2, 2, runners).run(1, actions, batches, training=True)

    on_all([lambda rank=rank: of_rank(rank) for rank in range(2)])  # type: ignore[misc]
    specs = pieces.programs[0].outputs
    crossed = {str(spec.dtype) for spec in specs}
    assert crossed == {"float32", "int64", "bool", "complex64", "bfloat16"}
    assert {len(spec.shape) for spec in specs} >= {0, 2, 3}, "a number without dims, an empty matrix, hidden values"
    assert any(0 in tensor.shape for tensor in watched[0].made[0].values())
    for sent, received in zip(watched[0].made, watched[1].given, strict=True):
        for spec in specs:
            before, after = sent[spec.name], received[spec.name]
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert torch.equal(after.detach(), before.detach())
            assert after.requires_grad == before.requires_grad == spec.requires_grad, spec.name
    assert {spec.requires_grad for spec in specs if str(spec.dtype) == "complex64"} == {True, False}


def test_gradients_come_back_through_every_kind(planes: dict[int, DataPlane], pieces: Cut) -> None:
    module, batches = Kinds(), [ids(2), ids(5)]
    runners = [StageRunner(pieces.programs[rank], pieces.weights(rank)) for rank in range(2)]

    def of_rank(rank: int) -> None:
        actions = actions_of_rank(Schedule.GPIPE, rank=rank, ranks=2, stages=2, micro_batches=2)
        executor(planes[rank], rank, 2, 2, {rank: runners[rank]}).run(2, actions, batches, training=True)

    on_all([lambda rank=rank: of_rank(rank) for rank in range(2)])  # type: ignore[misc]
    sum(module(**batch) * batch["ids"].numel() for batch in batches).backward()  # type: ignore[attr-defined]
    for runner in runners:
        for name, parameter in runner.parameters.items():
            torch.testing.assert_close(parameter.grad, module.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


class NoGradient(nn.Module):
    """A first stage with nothing to train: its outputs need no gradient, and none comes back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Embedding(11, 6)
        self.first.weight.requires_grad_(False)
        self.second = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second(self.first(ids)).square().mean()


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_a_stage_whose_outputs_need_no_gradient(planes: dict[int, DataPlane], schedule: Schedule) -> None:
    module = NoGradient()
    pieces = cut(capture(module, ids(4)), {"first": 0, "second": 1})
    split = schedule is Schedule.ZERO_BUBBLE
    runners = [StageRunner(pieces.programs[rank], pieces.weights(rank), split_backward=split) for rank in range(2)]

    def of_rank(rank: int) -> None:
        actions = actions_of_rank(schedule, rank=rank, ranks=2, stages=2, micro_batches=2)
        ours = executor(planes[rank], rank, 2, 2, {rank: runners[rank]})
        ours.run(3 + split, actions, [ids(2), ids(3)], training=True)

    on_all([lambda rank=rank: of_rank(rank) for rank in range(2)])  # type: ignore[misc]
    sum(module(**batch) * batch["ids"].numel() * 3 for batch in (ids(2), ids(3))).backward()  # type: ignore[attr-defined]
    assert runners[0].parameters["first.weight"].grad is None
    for name, parameter in runners[1].parameters.items():
        torch.testing.assert_close(parameter.grad, module.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
