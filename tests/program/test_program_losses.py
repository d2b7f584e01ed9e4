"""What a loss is the mean over: parts of a batch, weighted by what the program counts, give the loss of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_harness import eager, gradient_differences, loss_difference, run_cut, runners_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.core.errors import CaptureError
from distensor.program import capture, cut, run_module

ROWS, SEQUENCE, CLASSES = 6, 5, 7


class Tagger(nn.Module):
    """Scores for every token of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))  # type: ignore[no-any-return]


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 11, (rows, SEQUENCE), generator=generator)
    labels = torch.randint(0, CLASSES, (rows, SEQUENCE), generator=generator)
    return ids, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, -100)


def module() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().train()


def _flat(out: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return out.flatten(0, 1), labels.flatten()


def _wanted(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp(min=0), CLASSES).float()


CLASS_WEIGHT = torch.linspace(0.5, 2.0, CLASSES)
KEPT = lambda given: given[1] != -100  # noqa: E731  shorter where the losses are listed


def _soft(given: Any) -> Tensor:
    return torch.sigmoid(given[0].unsqueeze(-1) - torch.arange(CLASSES) * 1.5)


LOSSES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "cross_entropy": lambda out, given: F.cross_entropy(*_flat(out, given[1])),
    "cross_entropy of N C L": lambda out, given: F.cross_entropy(out.transpose(1, 2), given[1]),
    "cross_entropy, smoothed": lambda out, given: F.cross_entropy(*_flat(out, given[1]), label_smoothing=0.1),
    "cross_entropy, other index": lambda out, given: F.cross_entropy(
        *_flat(out, given[1].masked_fill(given[1] == -100, 3)), ignore_index=3
    ),
    "cross_entropy by class": lambda out, given: F.cross_entropy(*_flat(out, given[1]), weight=CLASS_WEIGHT),
    "cross_entropy of probabilities": lambda out, given: F.cross_entropy(
        out.flatten(0, 1), _soft(given).flatten(0, 1).softmax(-1)
    ),
    "cross_entropy, shifted": lambda out, given: F.cross_entropy(*_flat(out[:, :-1], given[1][:, 1:])),
    "nll": lambda out, given: F.nll_loss(F.log_softmax(out.flatten(0, 1), -1), given[1].flatten()),
    "nll by class": lambda out, given: F.nll_loss(
        F.log_softmax(out.flatten(0, 1), -1), given[1].flatten(), weight=CLASS_WEIGHT
    ),
    "mse": lambda out, given: F.mse_loss(out, _soft(given)),
    "l1": lambda out, given: F.l1_loss(out, _soft(given)),
    "smooth l1": lambda out, given: F.smooth_l1_loss(out, _soft(given)),
    "huber": lambda out, given: F.huber_loss(out, _soft(given), delta=0.5),
    "binary cross entropy": lambda out, given: F.binary_cross_entropy(torch.sigmoid(out), _soft(given)),
    "binary cross entropy of logits": lambda out, given: F.binary_cross_entropy_with_logits(out, _soft(given)),
    "kl divergence, summed": lambda out, given: (
        F.kl_div(F.log_softmax(out, -1), _soft(given), reduction="sum") / out.numel()
    ),
    "kl divergence per row": lambda out, given: F.kl_div(F.log_softmax(out, -1), _soft(given), reduction="batchmean"),
    "mean": lambda out, given: (out - _soft(given)).abs().mean(),
    "mean of means": lambda out, given: (out - _soft(given)).square().flatten(1).mean(1).mean(),
    "mean over all dims": lambda out, given: (out - _soft(given)).square().mean(dim=(0, 1, 2)),
    "sum over a count of the mask": lambda out, given: (out.logsumexp(-1) * KEPT(given)).sum() / KEPT(given).sum(),
    "sum over a count with a floor": lambda out, given: (
        (out.logsumexp(-1) * KEPT(given)).sum() / KEPT(given).sum().clamp(min=1)
    ),
    "sum over the rows": lambda out, given: (out - _soft(given)).square().sum() / out.shape[0],
    "sum over the elements": lambda out, given: (out - _soft(given)).square().sum() / out.numel(),
    "scaled": lambda out, given: 0.5 * F.cross_entropy(*_flat(out, given[1])) / 3 * 2.0,
    "negative": lambda out, given: -F.mse_loss(out, _soft(given)),
    "two of the same weight": lambda out, given: (
        F.cross_entropy(*_flat(out, given[1])) + 0.3 * F.cross_entropy(*_flat(out * 2, given[1]))
    ),
    "with a constant": lambda out, given: F.mse_loss(out, _soft(given)) + 1.5,
    "as a vector of one": lambda out, given: F.mse_loss(out, _soft(given)).reshape(1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_weighted_by_the_program_give_the_whole(name: str) -> None:
    loss, model = LOSSES[name], module()
    pieces = cut(capture(model, batch(), loss=loss))
    runners = runners_of(pieces)
    for given in (batch(), batch(4)):
        reference = eager(model, given, loss)
        for parts in (1, 2, 3):
            ours = run_cut(pieces, runners, given, parts)
            assert loss_difference(ours, reference) <= 1e-6, parts
            assert max(gradient_differences(ours, reference).values()) <= 2e-6, parts


class WithPenalty(Tagger):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.cross_entropy(*_flat(super().forward(ids), labels))
        return loss + 0.01 * self.head.weight.square().sum()


def test_a_term_of_parameters_alone_is_the_same_in_every_part() -> None:
    torch.manual_seed(0)
    model = WithPenalty().train()
    pieces = cut(capture(model, batch()))
    reference = eager(model, batch(), None)
    ours = run_cut(pieces, runners_of(pieces), batch(), 3)
    assert loss_difference(ours, reference) <= 1e-6
    assert max(gradient_differences(ours, reference).values()) <= 2e-6


def test_rows_without_any_target_count_nothing() -> None:
    model, loss = module(), LOSSES["cross_entropy"]
    ids, labels = batch()
    labels[:2] = -100
    pieces = cut(capture(model, batch(), loss=loss))
    reference = eager(model, (ids, labels), loss)
    ours = run_cut(pieces, runners_of(pieces), (ids, labels), 3)
    assert loss_difference(ours, reference) <= 1e-6
    assert max(gradient_differences(ours, reference).values()) <= 2e-6


UNPROVABLE: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "sum": (lambda out, given: F.mse_loss(out, _soft(given), reduction="sum"), "is a sum over the batch"),
    "sum of tokens": (
        lambda out, given: F.cross_entropy(*_flat(out, given[1]), reduction="sum"),
        "is a sum over the batch",
    ),
    "sum by a constant": (
        lambda out, given: F.cross_entropy(*_flat(out, given[1]), reduction="sum") / 12,
        "num_items_in_batch",
    ),
    "means of different weight": (
        lambda out, given: F.cross_entropy(*_flat(out, given[1])) + F.mse_loss(out, _soft(given)),
        r"cannot be found \(it ends in aten\.add\.Tensor",
    ),
    "a root of a mean": (lambda out, given: F.mse_loss(out, _soft(given)).sqrt(), r"ends in aten\.sqrt"),
    "the largest": (lambda out, given: (out - _soft(given)).abs().amax(), r"ends in aten\.amax"),
    "a mean over the sequence alone": (lambda out, given: (out - _soft(given)).mean(1).sum(), "sum over the batch"),
    "a product": (lambda out, given: F.mse_loss(out, _soft(given)) * out.mean(), r"ends in aten\.mul"),
}


@pytest.mark.parametrize("name", UNPROVABLE)
def test_a_loss_that_is_no_provable_mean_is_refused(name: str) -> None:
    loss, message = UNPROVABLE[name]
    with pytest.raises(CaptureError, match=message) as caught:
        capture(module(), batch(), loss=loss)
    assert "loss_weight='rows'" in str(caught.value)


def test_the_user_may_say_that_rows_count() -> None:
    def loss(out: Tensor, given: Any) -> Tensor:
        return (out - _soft(given)).square().flatten(1).mean(1).logsumexp(0)

    pieces = cut(capture(module(), batch(), loss=loss, loss_weight="rows"))
    (runner,) = runners_of(pieces)
    result = runner.forward(pieces.flatten_batch(batch(4)))
    assert int(result[str(runner.program.weight)]) == 4


def test_the_user_may_count() -> None:
    def loss(out: Tensor, given: Any) -> Tensor:
        return F.cross_entropy(*_flat(out, given[1]), reduction="none").sum() / KEPT(given).double().sum().float()

    model = module()
    pieces = cut(capture(model, batch(), loss=loss, loss_weight=lambda given: KEPT(given).sum()))
    runners = runners_of(pieces)
    reference = eager(model, batch(), loss)
    ours = run_cut(pieces, runners, batch(), 3)
    assert loss_difference(ours, reference) <= 1e-6
    assert max(gradient_differences(ours, reference).values()) <= 2e-6


def test_a_count_may_be_a_size() -> None:
    pieces = cut(
        capture(
            module(),
            batch(),
            loss=LOSSES["a"] if "a" in LOSSES else LOSSES["mse"],
            loss_weight=lambda given: given[0].shape[0],
        )
    )
    (runner,) = runners_of(pieces)
    assert int(runner.forward(pieces.flatten_batch(batch(3)))[str(runner.program.weight)]) == 3


def test_a_wrong_loss_weight_is_named() -> None:
    with pytest.raises(CaptureError, match="loss_weight='tokens'"):
        capture(module(), batch(), loss=LOSSES["mse"], loss_weight="tokens")  # type: ignore[arg-type]


def test_run_module_is_plain_eager() -> None:
    model = module()
    expected = LOSSES["mse"](model(batch()[0]), batch())
    assert torch.equal(run_module(model, batch(), LOSSES["mse"]), expected)
