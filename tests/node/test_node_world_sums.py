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
    sums = WorldSums(losses=(4.0, 2.0), weights=(4.0, 2.0), norms=(1.0, 5.0), place=1)
    assert (sums.weight, sums.grad_norm) == (6.0, 3.0)
    assert sums.scale(2.5) == pytest.approx(0.5 / 2, rel=1e-5)


def test_a_place_without_elements_has_sums_of_zero() -> None:
    sums = WorldSums(losses=(4.0, 0.0), weights=(4.0, 0.0), norms=(1.0, math.nan), place=1)
    assert sums.scale(None) == 1.0
    assert sums.grad_norm == 1.0


@pytest.mark.parametrize(
    ("losses", "norms"),
    [((1.0, 4.0), (math.nan, 3.0)), ((1.0, 4.0), (math.inf, 3.0)), ((math.nan, 4.0), (1.0, 3.0))],
)
def test_a_place_that_has_no_number_is_left_out(losses: tuple[float, float], norms: tuple[float, float]) -> None:
    here, there = (WorldSums(losses=losses, weights=(1.0, 2.0), norms=norms, place=place) for place in (0, 1))
    assert here.dropped == there.dropped == (0,)
    assert (here.loss, here.weight, here.grad_norm) == (2.0, 2.0, 3.0)
    assert math.isnan(here.scale(None))
    assert there.scale(None) == 0.5


@pytest.mark.parametrize("places", [1, 2])
def test_without_any_number_nothing_is_left_out(places: int) -> None:
    sums = WorldSums(losses=(1.0,) * places, weights=(1.0,) * places, norms=(math.inf,) * places, place=0)
    assert sums.dropped == ()
    assert math.isnan(sums.grad_norm)


def test_no_elements_at_all() -> None:
    sums = sum_over_world(None, (0.0, 0.0), 0.0, kind=NormType.TWO, place=0, places=2)
    assert math.isnan(sums.loss)
    assert math.isnan(sums.grad_norm)
    assert sums.weight == 0.0
