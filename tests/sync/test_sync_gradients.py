"""GradientReducer against the same data in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker_pool import Here, WorkerPool, worker_pool

from distensor.core.errors import ConfigError
from distensor.sync.gradients import GradientReducer

RANKS = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with worker_pool(RANKS) as workers:
        yield workers


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(11, 301), nn.Tanh(), nn.Linear(301, 257), nn.Tanh(), nn.Linear(257, 5))


def _batches(rank: int, micro_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(3 + rank + micro, 11, generator=generator) for micro in range(micro_batches)]


def _group() -> Any:
    return torch.distributed.group.WORLD


def reduced_gradients(here: Here, micro_batches: int, bucket_bytes: int, steps: int) -> list[Any]:
    model = _model()
    reducer = GradientReducer(list(model.parameters()), _group(), bucket_bytes)
    for _ in range(steps):
        model.zero_grad()
        reducer.begin(micro_batches)
        for batch in _batches(here.rank, micro_batches):
            model(batch).square().sum().backward()
        reducer.finish()
    assert reducer.bytes >= sum(4 * parameter.numel() for parameter in model.parameters())
    return [parameter.grad.numpy() for parameter in model.parameters()]


@pytest.mark.parametrize(("micro_batches", "bucket_bytes", "steps"), [(1, 1 << 20, 1), (3, 1 << 14, 2), (2, 1, 1)])
def test_sums_equal_one_process_and_are_bit_equal(
    pool: WorkerPool, micro_batches: int, bucket_bytes: int, steps: int
) -> None:
    results = pool.run(reduced_gradients, micro_batches, bucket_bytes, steps)
    model = _model()
    for rank in range(RANKS):
        for batch in _batches(rank, micro_batches):
            model(batch).square().sum().backward()
    for index, parameter in enumerate(model.parameters()):
        ours = torch.from_numpy(results[0][index])
        assert torch.linalg.vector_norm(ours - parameter.grad) <= 1e-6 * torch.linalg.vector_norm(parameter.grad)
        for other in results[1:]:
            assert (other[index] == results[0][index]).all()


def unevenly_used(here: Here) -> tuple[float | None, float | None, float | None]:
    used_by_one, used_by_none, used_by_all = (nn.Parameter(torch.ones(4)) for _ in range(3))
    reducer = GradientReducer([used_by_one, used_by_none, used_by_all], _group(), 16)
    reducer.begin(1)
    loss = (used_by_all * (here.rank + 1)).sum()
    if here.rank == 1:
        loss = loss + (used_by_one * 5).sum()
    loss.backward()
    reducer.finish()
    gradients = (used_by_one.grad, used_by_none.grad, used_by_all.grad)
    return tuple(None if gradient is None else gradient[0].item() for gradient in gradients)  # type: ignore[return-value]


def test_unused_parameters_take_part_with_zeros_and_stay_none_where_nobody_has_any(pool: WorkerPool) -> None:
    assert pool.run(unevenly_used) == [(5.0, None, 6.0)] * RANKS


def launched_during_backward(here: Here) -> bool:
    """Whether the last layer's bucket travels while the first layer still waits for its gradient."""
    model = _model()
    reducer = GradientReducer(list(model.parameters()), _group(), 1 << 10)
    seen: list[bool] = []
    model[0].weight.register_hook(lambda _: seen.append(reducer.bytes > 0))
    reducer.begin(1)
    model(_batches(here.rank, 1)[0]).sum().backward()
    reducer.finish()
    return seen == [True]


def test_buckets_travel_while_backward_runs(pool: WorkerPool) -> None:
    assert pool.run(launched_during_backward) == [True] * RANKS


def backward_once_too_often(here: Here) -> str:
    parameter = nn.Parameter(torch.ones(2))
    reducer = GradientReducer([parameter], _group())
    reducer.begin(1)
    parameter.sum().backward()
    try:
        parameter.sum().backward()
    except ConfigError as error:
        return str(error)
    finally:
        reducer.finish()
    return "no error"


def test_more_backwards_than_announced_are_an_error(pool: WorkerPool) -> None:
    assert all("more backward passes" in text for text in pool.run(backward_once_too_often))


def closed_reducer(here: Here) -> bool:
    parameter = nn.Parameter(torch.ones(2))
    reducer = GradientReducer([parameter], _group())
    reducer.begin(1)
    reducer.close()
    parameter.sum().backward()
    return reducer.bytes == 0


def test_closing_takes_the_hooks_away(pool: WorkerPool) -> None:
    assert pool.run(closed_reducer) == [True] * RANKS


def test_without_a_group_nothing_happens() -> None:
    parameter = nn.Parameter(torch.ones(2))
    reducer = GradientReducer([parameter], None)
    reducer.begin(1)
    parameter.sum().backward()
    reducer.finish()
    assert reducer.bytes == 0
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_a_bucket_needs_room() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes=0"):
        GradientReducer([], None, 0)


def accumulated_scalar(here: Here) -> float:
    """Two ranks, two micro-batches each, whose gradients are (1, 3) and (2, 5)."""
    parameter = nn.Parameter(torch.zeros(()))
    group = torch.distributed.new_group([0, 1], backend="distensor")
    if here.rank > 1:
        return 11.0
    reducer = GradientReducer([parameter], group)
    reducer.begin(2)
    for gradient in ((1.0, 3.0), (2.0, 5.0))[here.rank]:
        (parameter * gradient).backward()
    reducer.finish()
    assert parameter.grad is not None
    return parameter.grad.item()


def test_every_micro_batch_of_every_rank_is_in_the_sum(pool: WorkerPool) -> None:
    """4 here and 7 there: both hold 11, the mean over the ranks is 5.5."""
    assert pool.run(accumulated_scalar) == [11.0] * RANKS


def kept_gradients(here: Here) -> list[list[float]]:
    """Three steps of (1, 2, 3) + rank; gradients are let go before the second one and kept before the third."""
    parameter, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))
    reducer = GradientReducer([parameter, other], _group())
    found, places = [], set()
    for step in range(3):
        if step == 1:
            parameter.grad = None
        reducer.begin(1)
        (parameter * (torch.tensor([1.0, 2.0, 3.0]) + here.rank)).sum().backward()
        reducer.finish()
        assert parameter.grad is not None
        assert other.grad is None, "nobody had one"
        found.append(parameter.grad.tolist())
        places.add(parameter.grad.data_ptr())
    assert len(places) == 1, "the memory of a bucket is used again"
    return found


def test_memory_is_used_again_and_what_was_not_let_go_is_added_to(pool: WorkerPool) -> None:
    once = [6.0, 9.0, 12.0]
    expected = [once, once, [value * (RANKS + 1) for value in once]]
    assert pool.run(kept_gradients) == [expected] * RANKS
