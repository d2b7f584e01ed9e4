"""Contributions that do not come: all workers leave out the same ones, and who sent them keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_pool import GroupPool
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distensor.optim.distro import DeMo, DisTrO, DisTrOAdamW, SparseLoCo
from distensor.optim.distro.agreement import LACKING, digest_of, is_same_for_all, used_by_all
from distensor.optim.distro.exchange import Alone, GroupExchange

STEPS = 12


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1)))
def test_what_is_used_is_what_everybody_has(views: list[list[bool]]) -> None:
    used = used_by_all(views)
    assert len(used) == len(views[0])
    assert all(is_used == all(view[i] for view in views) for i, is_used in enumerate(used))


def test_sets_that_differ_in_anything_have_other_digests() -> None:
    sets: list[Sequence[bytes | None]] = [
        [b"a", b"b"], [b"b", b"a"], [b"a", None], [None, b"a"], [b"a", b""], [b"ab", b""], [None, None], [b"", b""],
        [b"1 ", b""], [b"", b"1 "],
    ]  # fmt: skip
    digests = [digest_of(each) for each in sets]
    assert len(set(digests)) == len(sets)
    assert all(0 < digest < 1 << 63 for digest in digests)
    assert is_same_for_all([digests[0]] * 3)
    assert not is_same_for_all(digests[:2])
    assert not is_same_for_all([LACKING, LACKING])


def losing(rank: int, turn: int, sender: int) -> bool:
    """Which messages reach worker `rank`: of each sender a quarter does not, other ones at each worker."""
    return (turn * 7 + sender * 3 + rank * 5) % 4 != 0


class Recorder(GroupExchange):
    """Remembers which contributions were used."""

    used: list[tuple[bool, ...]]

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        found = super().gather(message)
        self.used.append(tuple(each is not None for each in found))
        return found


def train(rank: int, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    group = dist.new_group() if name == "DisTrO" else None
    exchange = Recorder(group, torch.device("cpu"), arrives=lambda turn, sender: losing(rank, turn, sender))
    exchange.used = []
    kinds = {"DisTrOAdamW": DisTrOAdamW, "DeMo": DeMo, "DisTrO": DisTrO, "SparseLoCo": SparseLoCo}
    options: dict[str, Any] = {"every": 1} if name == "SparseLoCo" else {}
    optimizer = kinds[name](model.parameters(), lr=0.01, k=8, chunk=64, exchange=exchange, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    return {"weights": [p.tolist() for p in model.parameters()], "used": exchange.used}


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    made = GroupPool(2)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["DisTrOAdamW", "DeMo", "DisTrO", "SparseLoCo"])
def test_workers_that_miss_different_messages_stay_equal(pool: GroupPool, name: str) -> None:
    first, second = pool.run(train, name)
    assert first["used"] == second["used"]
    used = [is_used for each in first["used"] for is_used in each]
    assert 0.1 < used.count(False) / len(used) < 0.4
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: DisTrOAdamW(p, k=4, chunk=16, exchange=Alone()),
        lambda p: DeMo(p, k=4, chunk=16, exchange=Alone()),
        lambda p: SparseLoCo(p, k=4, chunk=16, every=1, exchange=Alone()),
    ],
    ids=["adamw", "demo", "sparseloco"],
)
def test_who_is_left_out_keeps_what_it_sent(make: Any) -> None:
    class LeftOut(Alone):
        def gather(self, message: bytes) -> Sequence[bytes | None]:
            return [None]

    def after(exchange: Alone) -> tuple[nn.Parameter, Any]:
        weight = nn.Parameter(torch.linspace(-1, 1, 48).reshape(6, 8))
        optimizer = make([weight])
        optimizer._exchange = exchange
        weight.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
        return weight, optimizer

    weight, optimizer = after(LeftOut())
    optimizer.step()
    other, sender = after(Alone())
    if isinstance(sender, SparseLoCo):
        sender.inner_step()
    message = sender.propose()
    kept = sender.state[other]["residual"].clone()
    sender.take_back(message)
    whole = sender.state[other]["residual"]
    assert float((whole - kept).abs().max()) > 1e-4
    assert torch.allclose(optimizer.state[weight]["residual"], whole, atol=1e-6)
    assert optimizer.exchanged.silent == (0,)
