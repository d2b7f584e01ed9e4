"""The process-group helpers on the backend "distensor", whose store is no meeting place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worker_pool import Here, WorkerPool, worker_pool

import distensor.core.distributed as helpers
from distensor.core.errors import GroupMismatchError


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    with worker_pool(2) as pool:
        yield pool


def mesh(here: Here) -> list[Any]:
    helpers.dist_init(pp_size=2)
    found = [helpers.get_pp_world_size(), helpers.get_pp_rank(), helpers.get_dp_world_size()]
    weight = torch.tensor([2.0 + here.rank], requires_grad=True)
    helpers.pp_scheduler().step(
        [lambda x: x * weight],
        [torch.ones(1), torch.full((2,), 3.0)] if here.rank == 0 else None,
        micro_batches=2,
        loss=(lambda y, _: y.sum()) if here.rank == 1 else None,
    )
    assert weight.grad is not None
    helpers.destroy_model_parallel()
    return [*found, weight.grad.item()]


def test_a_mesh_and_a_pipeline_step(pair: WorkerPool) -> None:
    assert pair.run(mesh) == [[2, 0, 1, 21.0], [2, 1, 1, 14.0]]


def agreements(here: Here) -> list[Any]:
    group = dist.group.WORLD
    words = []
    for item in (torch.zeros(2, dtype=torch.int32 if here.rank else None), "text" if here.rank else torch.zeros(3)):
        with pytest.raises(GroupMismatchError) as caught:
            helpers.broadcast(item, group)
        words.append(str(caught.value))
    got = helpers.broadcast(None if here.rank else torch.ones(3, dtype=torch.bfloat16), group)
    x = torch.full((2 + here.rank,), float(here.rank), requires_grad=True)
    joined = helpers.cat_outputs_cp_with_grad(x, 0, group, gradient="sum", lengths=[2, 3])
    (joined * (1 + here.rank)).sum().backward()
    assert x.grad is not None
    return [words, got.tolist(), joined.tolist(), x.grad.tolist()]


def test_ranks_agree_before_they_send(pair: WorkerPool) -> None:
    first, second = pair.run(agreements)
    assert first[0] == second[0]
    assert "rank 0: torch.float32 of shape (2,) (the source), rank 1: torch.int32 of shape (2,)" in first[0][0]
    assert first[1:] == [[1.0] * 3, [0, 0, 1, 1, 1], [3.0, 3.0]]
    assert second[1:] == [[1.0] * 3, [0, 0, 1, 1, 1], [3.0, 3.0, 3.0]]
