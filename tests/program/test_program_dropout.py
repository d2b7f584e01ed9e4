"""Dropout follows the seed and the place in the graph: the same on every run and under every cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_harness import cut_module, eager, gradient_differences, loss_difference, run_cut, runners_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.program.draws import Draws, mix

ROWS = 512


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.3, self.training)
        hidden = F.dropout(self.second(hidden), 0.2, self.training)
        return self.third(hidden)  # type: ignore[no-any-return]


class Attentive(nn.Module):
    def __init__(self, causal: bool = True, gqa: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 4 if gqa else 8)
        self.causal, self.gqa = causal, gqa

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        query = self.q(x).view(rows, 2, 4, 1).transpose(2, 3).transpose(2, 3)
        key = self.k(x).view(rows, -1, 4, 1)
        mask = None if self.causal else torch.ones(4, 4, dtype=torch.bool).tril(1)
        out = F.scaled_dot_product_attention(
            query, key, key, mask, dropout_p=0.4 if self.training else 0.0, is_causal=self.causal, enable_gqa=self.gqa
        )
        return out.flatten(1)


def squared(out: Any, given: Any) -> Tensor:
    return F.mse_loss(out, given[1])


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def test_the_seed_decides() -> None:
    pieces = cut_module(Noisy().train(), batch(), None, loss=squared)
    runners = runners_of(pieces)
    same = [run_cut(pieces, runners, batch(), seed=7).loss for _ in range(3)]
    assert len(set(same)) == 1
    assert run_cut(pieces, runners, batch(), seed=8).loss != same[0]


def test_every_cut_draws_the_same() -> None:
    results = []
    for stages in (None, [["first"], ["second", "third"]], [["first"], ["second"], ["third"]]):
        pieces = cut_module(Noisy().train(), batch(), stages, loss=squared)
        results.append(run_cut(pieces, runners_of(pieces), batch(), seed=3))
    for other in results[1:]:
        assert other.loss == results[0].loss
        assert max(gradient_differences(other, results[0]).values()) == 0.0


def test_training_false_is_the_module_in_eval_mode() -> None:
    model = Noisy().train()
    pieces = cut_module(model, batch(), None, loss=squared)
    (runner,) = runners_of(pieces)
    ours = runner.forward(pieces.flatten_batch(batch()), training=False)[str(runner.program.loss)]
    assert torch.equal(ours, squared(model.eval()(batch()[0]), batch()))


def test_dropout_keeps_the_mean() -> None:
    pieces = cut_module(Noisy().train(), batch(), None, loss=lambda out, given: out.mean())
    (runner,) = runners_of(pieces)
    name, flat = str(runner.program.loss), pieces.flatten_batch(batch())
    noisy = torch.stack([runner.forward(flat, seed=seed)[name].detach() for seed in range(200)])
    plain = runner.forward(flat, training=False)[name].detach()
    assert noisy.std() > 0
    assert abs(noisy.mean() - plain) < 4 * noisy.std() / 200**0.5


@pytest.mark.parametrize(("causal", "gqa"), [(True, False), (False, False), (True, True)])
def test_attention_dropout(causal: bool, gqa: bool) -> None:
    model = Attentive(causal, gqa).train()
    pieces = cut_module(model, batch(), None, loss=squared)
    (runner,) = runners_of(pieces)
    name, flat = str(runner.program.loss), pieces.flatten_batch(batch())
    first = runner.forward(flat, seed=1)[name]
    assert torch.equal(first, runner.forward(flat, seed=1)[name])
    assert not torch.equal(first, runner.forward(flat, seed=2)[name])
    reference = eager(model.eval(), batch(), squared)
    assert abs(float(runner.forward(flat, training=False)[name].detach()) - reference.loss) <= 1e-6 * reference.loss


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "additive"])
def test_attention_with_dropout_is_attention_when_nothing_is_dropped(mask: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    allowed = torch.rand(5, 5) < 0.7
    allowed.fill_diagonal_(True)
    given = {"boolean": allowed, "additive": torch.randn(5, 5)}.get(mask)
    expected = F.scaled_dot_product_attention(query, key, value, given, 0.0, mask == "causal", scale=0.3)
    ours = Draws(torch.device("cpu")).attention(0, query, key, value, given, 1e-12, mask == "causal", scale=0.3)
    torch.testing.assert_close(ours, expected)


def test_feature_dropout_drops_whole_channels() -> None:
    draws = Draws(torch.device("cpu"))
    draws.start(5, training=True)
    kept = draws.feature_dropout(0, torch.ones(16, 8, 3, 3), 0.5, True)
    per_channel = kept.flatten(2)
    assert torch.equal(per_channel.amin(-1), per_channel.amax(-1))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert draws.dropout(0, torch.ones(4), 1.0, True).sum() == 0


@pytest.mark.parametrize("make", ["rand", "randn", "rand_like", "randn_like"])
def test_random_tensors_follow_the_seed(make: str) -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            drawn = getattr(torch, make)(x) if make.endswith("like") else getattr(torch, make)(x.shape[0], 8)
            return self.layer(x + drawn)  # type: ignore[no-any-return]

    pieces = cut_module(Random().train(), batch(), None, loss=squared)
    (runner,) = runners_of(pieces)
    name, flat = str(runner.program.loss), pieces.flatten_batch(batch())
    losses = {float(runner.forward(flat, seed=seed)[name].detach()) for seed in (1, 1, 2)}
    assert len(losses) == 2


def test_seeds_and_sites_give_unrelated_streams() -> None:
    drawn = {mix(seed, site) for seed in range(50) for site in range(50)}
    assert len(drawn) == 2500
    assert all(0 <= value < 2**63 for value in drawn)


def test_a_dropout_of_zero_is_no_operation_at_all() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8)).train()
    pieces = cut_module(model, batch(), [["0"], ["2"]], loss=squared)
    assert not any(node.op == "aten.dropout.default" for program in pieces.programs for node in program.nodes)
    reference = eager(model, batch(), squared)
    assert loss_difference(run_cut(pieces, runners_of(pieces), batch()), reference) <= 1e-7
