"""The comparison with one process is itself compared: a difference is found, and NaN is never equal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from distensor.core.compute import Precision
from distensor.training.parity import compare, relative_difference, relative_loss_difference


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


BATCH = torch.ones(4, 3)


@pytest.fixture
def module() -> Model:
    return Model()


def right(module: Model) -> tuple[float, dict[str, Tensor]]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    loss = module(BATCH)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def test_the_same_is_no_difference(module: Model) -> None:
    parity = compare(module, BATCH, None, *right(module))
    assert parity.max_relative_difference == 0
    assert module.layer.weight.grad is None, "the user's module is left alone"


def test_each_difference_is_found(module: Model) -> None:
    loss, gradients = right(module)
    assert compare(module, BATCH, None, loss * 1.01, gradients).loss_difference == pytest.approx(0.01, rel=1e-3)
    worse = {**gradients, "layer.bias": gradients["layer.bias"] * 1.1}
    assert compare(module, BATCH, None, loss, worse).worst_gradient == ("layer.bias", pytest.approx(0.1, rel=1e-3))
    del worse["layer.bias"]
    assert compare(module, BATCH, None, loss, worse).worst_gradient == ("layer.bias", pytest.approx(1.0))


@pytest.mark.parametrize("name", ["layer.weight", "layer.bias"])
def test_what_is_no_number_is_never_equal(module: Model, name: str) -> None:
    loss, gradients = right(module)
    broken = {**gradients, name: torch.full_like(gradients[name], math.nan)}
    assert compare(module, BATCH, None, loss, broken).max_relative_difference == math.inf
    assert compare(module, BATCH, None, math.nan, gradients).max_relative_difference == math.inf


def test_differences_are_relative() -> None:
    assert relative_difference(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0])) == 0.5
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_difference(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_difference(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert relative_loss_difference(1.1, 1.0) == pytest.approx(0.1)
    assert relative_loss_difference(0.5, 0.0) == 0.5
    assert relative_loss_difference(1.0, math.nan) == math.inf


def test_bfloat16_is_compared_with_eager_autocast(module: Model) -> None:
    names, parameters = zip(*module.named_parameters(), strict=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(BATCH)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    assert compare(module, BATCH, None, loss.item(), gradients, Precision.BF16).max_relative_difference == 0
    assert compare(module, BATCH, None, loss.item(), gradients).max_relative_difference > 1e-5
