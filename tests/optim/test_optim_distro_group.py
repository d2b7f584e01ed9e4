"""The optimizers in a script of one's own: real processes, torch.distributed on gloo, nothing else of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_pool import GroupPool
from torch import nn

from distensor.optim.distro import DeMo, DiLoCo, DisTrO, DisTrOAdamW, SparseLoCo


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    made = GroupPool(2)
    yield made
    made.close()


def train(rank: int, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    kinds = {"DisTrOAdamW": DisTrOAdamW, "DeMo": DeMo, "DisTrO": DisTrO, "DiLoCo": DiLoCo, "SparseLoCo": SparseLoCo}
    options = {"every": 5} if name in ("DiLoCo", "SparseLoCo") else {"k": 8, "chunk": 64}
    group = dist.new_group() if name == "DisTrO" else None
    optimizer = kinds[name](model.parameters(), lr=0.01, group=group, **options)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(40):
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    return {
        "weights": [p.tolist() for p in model.parameters()],
        "losses": losses,
        "sent": optimizer.bytes_sent,
    }


@pytest.mark.parametrize("name", ["DisTrOAdamW", "DeMo", "DisTrO", "DiLoCo", "SparseLoCo"])
def test_two_processes_learn_together(pool: GroupPool, name: str) -> None:
    first, second = pool.run(train, name)
    assert first["weights"] == second["weights"]
    assert first["losses"] != second["losses"]  # each on its own data
    for losses in (first["losses"], second["losses"]):
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    elements = 8 * 32 + 32 + 32 + 1
    assert 0 < first["sent"] < 40 * elements * 4 / 4  # under a quarter of one dense copy a step
