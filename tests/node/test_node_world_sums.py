"""What a step's sums say of one model, and of replicas that keep their own gradients."""

from __future__ import annotations

import math

import pytest

from distensor.node.world_sums import WorldSums, sum_over_world
from distensor.optim.clipping import NormType


def test_alone() -> None:
    sums = sum_over_world(None, (6.0, 3.0), 36.0, kind=NormType.TWO, place=0, places=1)
    assert (sums.loss, sums.weight, sums.grad_norm) == (2.0, 3.0, 2.0)
    assert sums.scale(None) == pytest.approx(1 / 3)
    assert sums.scale(1.0) == pytest.approx(1 / 3 / 2, rel=1e-5)


def test_each_place_has_its_own_scale() -> None:
    sums = WorldSums(loss=1.0, weights=(4.0, 2.0), norms=(1.0, 5.0), place=1)
    assert (sums.weight, sums.grad_norm) == (6.0, 3.0)
    assert sums.scale(2.5) == pytest.approx(0.5 / 2, rel=1e-5)


def test_a_place_without_elements_has_sums_of_zero() -> None:
    sums = WorldSums(loss=1.0, weights=(4.0, 0.0), norms=(1.0, math.nan), place=1)
    assert sums.scale(None) == 1.0
    assert sums.grad_norm == 1.0


@pytest.mark.parametrize("norms", [(math.nan, 1.0), (math.inf, 1.0)])
def test_one_place_that_has_no_number_is_none_of_all(norms: tuple[float, float]) -> None:
    assert math.isnan(WorldSums(loss=1.0, weights=(1.0, 1.0), norms=norms, place=0).grad_norm)


def test_no_elements_at_all() -> None:
    sums = sum_over_world(None, (0.0, 0.0), 0.0, kind=NormType.TWO, place=0, places=2)
    assert math.isnan(sums.loss)
    assert math.isnan(sums.grad_norm)
    assert sums.weight == 0.0
