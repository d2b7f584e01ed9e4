"""Our schedules beside torch.distributed.pipelining on gloo: the same stages, the same gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from group_pool import GroupPool
from node_kit import on_all, planes_of, run_pipeline, runners_of
from torch import Tensor, nn

from distensor.core.schedules import Schedule
from distensor.node.tied import sum_tied_gradients
from distensor.program import capture, cut
from distensor.transport import DataPlane

RANKS, MICRO_BATCHES, ROWS, WIDTH = 2, 4, 8, 6
NAMES = {
    Schedule.GPIPE: ("ScheduleGPipe", 1),
    Schedule.ONE_F_ONE_B: ("Schedule1F1B", 1),
    Schedule.LOOPED_BFS: ("ScheduleLoopedBFS", 2),
    Schedule.INTERLEAVED: ("ScheduleInterleaved1F1B", 2),
    Schedule.ZERO_BUBBLE: ("ScheduleInterleavedZeroBubble", 2),
    Schedule.ZBV: ("ScheduleZBVZeroBubble", 2),
}


def model(stages: int) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def loss_of(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch[1])


def stock(rank: int, name: str, stages: int) -> tuple[dict[str, Tensor], list[float]]:
    """The gradients of this rank's stages and the losses it saw, as torch's schedule computes them."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    assert dist.get_backend() == "gloo"
    whole, (inputs, targets) = model(stages), data()
    chunks = stages // RANKS
    own = [rank + RANKS * chunk for chunk in range(chunks)]
    if name == "ScheduleZBVZeroBubble":
        own = [rank, stages - 1 - rank]
    made = [pipelining.PipelineStage(whole[stage], stage, stages, torch.device("cpu")) for stage in own]
    kind = getattr(schedules, name)
    schedule = kind(made[0] if chunks == 1 else made, MICRO_BATCHES, loss_fn=F.mse_loss)
    given = (inputs,) if 0 in own else ()
    losses: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step(*given, target=targets if stages - 1 in own else None, losses=losses)
    gradients = {
        f"{stage}.{key}": parameter.grad
        for stage in own
        for key, parameter in whole[stage].named_parameters()
        if parameter.grad is not None
    }
    return gradients, [float(loss.detach()) for loss in losses]


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    """Two processes in one gloo group, for all tests of this file."""
    made = GroupPool(RANKS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(RANKS) as opened:
        yield opened


def ours(
    planes: Mapping[int, DataPlane], schedule: Schedule, stages: int, sequence: int
) -> tuple[dict[str, Tensor], float]:
    """The mean gradients of all stages and the mean loss."""
    captured = capture(model(stages), data(), loss=loss_of)
    pieces = cut(captured, {str(stage): stage for stage in range(stages)})
    runners = [runners_of(pieces, rank, RANKS, schedule) for rank in range(RANKS)]
    batches = pieces.split_rows(pieces.flatten_batch(data()), [ROWS // MICRO_BATCHES] * MICRO_BATCHES)
    totals = run_pipeline(planes, runners, schedule, list(batches), sequence=sequence)
    weight = sum(each.weight for each in totals)
    gradients = {
        name: parameter.grad / weight
        for held in runners
        for runner in held.values()
        for name, parameter in runner.parameters.items()
        if parameter.grad is not None
    }
    return gradients, sum(each.loss_times_weight for each in totals) / weight


@pytest.mark.parametrize("schedule", list(Schedule))
def test_losses_and_gradients_equal_those_of_torchs_schedule_on_gloo(
    pool: GroupPool, planes: dict[int, DataPlane], schedule: Schedule
) -> None:
    name, chunks = NAMES[schedule]
    stages = RANKS * chunks
    theirs: dict[str, Tensor] = {}
    losses: list[float] = []
    for gradients, seen in pool.run(stock, name, stages):
        theirs.update(gradients)
        losses += seen
    mine, loss = ours(planes, schedule, stages, list(Schedule).index(schedule) + 1)
    assert len(losses) == MICRO_BATCHES
    assert loss == pytest.approx(sum(losses) / MICRO_BATCHES, rel=1e-6)
    assert mine.keys() == theirs.keys()
    assert len(mine) == 2 * stages
    for key, gradient in mine.items():
        assert float((gradient - theirs[key]).norm()) <= 1e-6 * float(theirs[key].norm()), key


class Embedding(nn.Module):
    """The first stage of a language model whose head is tied to its embedding."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        return x + torch.tanh(self.layer(x))


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x + torch.tanh(self.layer(x)), self.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        weight = torch.randn(11, WIDTH) / 2
        self.first, self.last = Embedding(weight), Head(weight)
        self.last.weight = self.first.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(self.last(self.first(ids)), labels)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def texts() -> dict[str, Tensor]:
    ids = torch.randint(11, (ROWS, 5), generator=torch.Generator().manual_seed(3))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def norm_of(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def stock_tied_norm(rank: int) -> float:
    """The gradient norm of this rank's stage of the tied model under torch's 1F1B."""
    from torch.distributed import pipelining

    whole, batch = Tied(), texts()
    whole.last.weight = nn.Parameter(whole.first.weight.detach().clone())  # a process has its own copy
    mine = whole.first if rank == 0 else whole.last
    made = pipelining.PipelineStage(mine, rank, RANKS, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(made, MICRO_BATCHES, loss_fn=next_token_loss)
    if rank == 0:
        schedule.step(batch["ids"])
    else:
        schedule.step(target=batch["labels"], losses=[])
    return norm_of([parameter.grad for parameter in mine.parameters() if parameter.grad is not None])


def test_a_tied_weight_counts_once_with_both_its_gradients(pool: GroupPool, planes: dict[int, DataPlane]) -> None:
    """NUM-05: stages of the stock schedule know half of the gradient each; their norms do not make the true one."""
    module = Tied()
    module(**texts()).backward()
    true = norm_of([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    stages = pool.run(stock_tied_norm)
    assert abs(math.hypot(*stages) - true) > 0.02 * true
    pieces = cut(capture(Tied(), texts()), {"first": 0, "last": 1})
    assert [group.stages for group in pieces.tied] == [(0, 1)]
    runners = [runners_of(pieces, rank, RANKS) for rank in range(RANKS)]
    batches = list(pieces.split_rows(pieces.flatten_batch(texts()), [ROWS // MICRO_BATCHES] * MICRO_BATCHES))
    totals = run_pipeline(planes, runners, Schedule.ONE_F_ONE_B, batches, sequence=50)
    name = pieces.tied[0].name

    def sum_up(rank: int) -> None:
        holders = [(stage, stage, name) for stage in range(RANKS)]
        weights = {f"{rank}/{key}": parameter for key, parameter in runners[rank][rank].parameters.items()}
        sum_tied_gradients(plane=planes[rank], rank=rank, sequence=51, index=0, holders=holders, weights=weights)

    on_all([lambda rank=rank: sum_up(rank) for rank in range(RANKS)])  # type: ignore[misc]
    counted = [
        parameter.grad
        for rank, held in enumerate(runners)
        for key, parameter in held[rank].parameters.items()
        if parameter.grad is not None and (rank, key) != (1, name)
    ]
    assert norm_of(counted) / sum(each.weight for each in totals) == pytest.approx(true, rel=1e-6)
