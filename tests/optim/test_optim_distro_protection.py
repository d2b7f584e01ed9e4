"""Planted offenders: too large, copied, no numbers at all, far from everybody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distensor.core.errors import FrameError
from distensor.optim.distro.adamw import DisTrOAdamW
from distensor.optim.distro.codec import Rows, decode
from distensor.optim.distro.exchange import Alone
from distensor.optim.distro.layout import make_layout
from distensor.optim.distro.local import DiLoCo, SparseLoCo
from distensor.optim.distro.protection import IN_A_ROW, CopyWatch, copied, lost_most, robust_mean, row_factors
from distensor.optim.distro.selection import select
from distensor.optim.sparse_spec import Average
from distensor.testing.exchange import Meeting, ThreadExchange

SHAPE = (128, 128)


def update_of(matrix: Tensor, k: int = 32, chunk: int = 4096) -> list[Rows]:
    layout = make_layout([matrix.shape], k=k, chunk=chunk)
    block = layout.blocks[0]
    return [select(matrix.reshape(block.rows, block.length), block.kept, 1).rows]


def random_updates(count: int, k: int = 32, chunk: int = 4096) -> list[list[Rows]]:
    generator = torch.Generator().manual_seed(k + chunk)
    return [update_of(torch.randn(SHAPE, generator=generator), k, chunk) for _ in range(count)]


def test_honest_updates_stay_as_they_are() -> None:
    updates = random_updates(5)
    for update, scales in zip(updates, row_factors(updates, 4.0), strict=True):
        assert all((scale == 1.0).all() for scale in scales)
        assert not lost_most(update, scales)


def test_what_is_much_too_large_is_scaled_to_the_limit() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(SHAPE, generator=generator) for _ in range(5)]
    matrices[3] *= 1000.0
    updates = [update_of(matrix) for matrix in matrices]
    scales = row_factors(updates, 4.0)
    norms = [
        np.linalg.norm(update[0].values() * scale[0][:, None]) for update, scale in zip(updates, scales, strict=True)
    ]
    assert norms[3] == pytest.approx(4.0 * np.median(norms), rel=0.3)
    assert [lost_most(update, scale) for update, scale in zip(updates, scales, strict=True)] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(("count", "limit"), [(2, 4.0), (4, None)])
def test_two_cannot_judge_each_other_and_nobody_judges_unasked(count: int, limit: float | None) -> None:
    updates = random_updates(count)
    updates[1] = update_of(torch.ones(SHAPE) * 1e6)
    assert all((scale == 1.0).all() for scales in row_factors(updates, limit) for scale in scales)


def test_rows_of_zeros_do_not_count() -> None:
    """Three of four have never seen what the row is of."""
    updates = [update_of(torch.zeros(SHAPE)) for _ in range(3)] + random_updates(1)
    assert all((scale == 1.0).all() for scales in row_factors(updates, 4.0) for scale in scales)


@pytest.mark.parametrize(("k", "chunk"), [(32, 4096), (8, 1024), (512, 4096), (8, 16)])
def test_copies_are_found_and_chance_is_not(k: int, chunk: int) -> None:
    """Of half of the entries, half are equal by chance."""
    updates = random_updates(4, k, chunk)
    layout = make_layout([SHAPE], k=k, chunk=chunk)
    assert copied(layout, updates) == []
    updates[2] = updates[0]
    assert copied(layout, updates) == [(0, 2)]


def test_a_copy_with_other_signs_and_some_other_places_is_one() -> None:
    generator = torch.Generator().manual_seed(2)
    original, noise = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    updates = [update_of(original), update_of(-original + 0.2 * noise), update_of(noise)]
    assert copied(make_layout([SHAPE], k=32), updates) == [(0, 1)]


def test_a_pair_is_told_of_when_it_is_alike_again_and_again() -> None:
    """Honest workers are alike in their first steps."""
    watch = CopyWatch()
    told = [watch.see(pairs) for pairs in [[(0, 1), (0, 2)]] * (IN_A_ROW - 1) + [[(0, 1)]] * 2 + [[], [(0, 1)]]]
    assert told == [()] * (IN_A_ROW - 1) + [((0, 1),)] * 2 + [(), ()]


def test_few_places_say_nothing() -> None:
    update = update_of(torch.randn(3, 3), 1, 9)
    assert copied(make_layout([(3, 3)], k=1, chunk=9), [update, update]) == []
    assert copied(make_layout([], k=1), [[], []]) == []
    whole = update_of(torch.randn(8, 8), 64, 64)
    assert copied(make_layout([(8, 8)], k=64, chunk=64), [whole, whole]) == []
    nothing = update_of(torch.zeros(SHAPE))
    assert copied(make_layout([SHAPE], k=32), [nothing, nothing]) == []


def test_an_optimizer_names_who_is_scaled_down_and_who_copies() -> None:
    weight = nn.Parameter(torch.zeros(SHAPE))
    workers = [DisTrOAdamW([weight], lr=0.1, eps=0.1, weight_decay=0.0, exchange=Alone()) for _ in range(5)]
    generator = torch.Generator().manual_seed(4)
    seen = []
    for _ in range(IN_A_ROW):
        messages = []
        for rank, worker in enumerate(workers):
            if rank != 4:
                weight.grad = torch.randn(SHAPE, generator=generator)
            if rank == 1:
                worker._residual_of(weight).normal_(std=1e6, generator=generator)
            messages.append(b"" if rank == 2 else worker.propose())
        workers[0].apply(messages)
        seen.append(workers[0].exchanged)
    assert all((each.silent, each.clipped) == ((2,), (1,)) for each in seen)
    assert [each.copies for each in seen] == [()] * (IN_A_ROW - 1) + [((3, 4),)]
    assert float(weight.detach().abs().max()) < 100.0  # a tenth of at most some times what honest ones send
    assert decode(workers[0].layout, messages[1])[0].values().max() > 1e6


@pytest.mark.parametrize("average", [Average.TRIMMED, Average.CENTRED])
def test_robust_means_do_without_one_of_five(average: Average) -> None:
    generator = torch.Generator().manual_seed(1)
    honest = 1.0 + 0.1 * torch.randn(4, 50, generator=generator)
    stack = torch.cat([honest, torch.full((1, 50), -1000.0)])
    assert float((robust_mean(stack, average) - 1.0).abs().max()) < 0.4
    assert float((robust_mean(stack, Average.MEAN) - 1.0).abs().max()) > 100


@pytest.mark.parametrize("average", list(Average))
def test_equal_rows_are_their_own_mean(average: Average) -> None:
    row = torch.linspace(-1, 1, 7)
    for count in (1, 2, 5):
        assert torch.allclose(robust_mean(row.repeat(count, 1), average), row, atol=1e-6)


def together(
    make: Callable[..., Any], gradients: list[list[float]], workers: int = 3
) -> tuple[list[Tensor], list[Any]]:
    """[step][worker] -> what all gradients are; each worker its own weight."""
    meeting = Meeting(workers)
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(workers)]
    optimizers: list[Any] = [None] * workers

    def work(rank: int) -> None:
        optimizers[rank] = make([weights[rank]], exchange=ThreadExchange(rank, meeting))
        for step in gradients:
            weights[rank].grad = torch.full((8,), step[rank])
            optimizers[rank].step()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [weight.detach() for weight in weights], optimizers


NAN = float("nan")
LOCAL = {
    "diloco": lambda ps, **kw: DiLoCo(ps, lr=0.1, every=2, **kw),
    "trimmed": lambda ps, **kw: DiLoCo(ps, lr=0.1, every=2, average="trimmed", **kw),
    "centred": lambda ps, **kw: DiLoCo(ps, lr=0.1, every=2, average="centred", **kw),
    "sparseloco": lambda ps, **kw: SparseLoCo(ps, lr=0.1, every=2, k=4, chunk=8, **kw),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_gradient_that_is_no_number_is_a_step_not_taken(name: str) -> None:
    weights, optimizers = together(LOCAL[name], [[1.0, NAN, 1.0], [1.0, 1.0, 1.0]])
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert torch.isfinite(weights[0]).all()
    assert float(weights[0].min()) < 0
    assert [optimizer.dropped for optimizer in optimizers] == [0, 1, 0]
    assert all(optimizer.exchanged.silent == () for optimizer in optimizers)


@pytest.mark.parametrize("name", LOCAL)
def test_weights_that_are_no_numbers_reach_nobody(name: str) -> None:
    def make(params: list[nn.Parameter], exchange: ThreadExchange) -> Any:
        optimizer = LOCAL[name](params, exchange=exchange)
        if exchange.rank == 2:
            params[0].data[3] = float("inf")
        return optimizer

    weights, optimizers = together(make, [[1.0] * 3] * 2)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert torch.isfinite(weights[0]).all()
    assert float(weights[0].min()) < 0
    assert all(optimizer.exchanged.silent == (2,) for optimizer in optimizers)


def test_changes_of_another_model_are_refused() -> None:
    class Odd(Alone):
        def gather(self, message: bytes) -> list[bytes | None]:
            return [message, b"123"]

    weight = nn.Parameter(torch.zeros(4))
    optimizer = DiLoCo([weight], every=1, average="trimmed", exchange=Odd())
    weight.grad = torch.ones(4)
    with pytest.raises(FrameError, match="worker 1 sent 3 bytes"):
        optimizer.step()
