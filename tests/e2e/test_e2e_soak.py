"""Processes of every kind are killed at random moments of a training run; nothing is lost, and the numbers stay."""

from __future__ import annotations

import os
import random

import pytest
from killing import Figures, soak

KILLS = int(os.environ.get("DISTENSOR_SOAK_KILLS", "100"))
SEED = int(os.environ.get("DISTENSOR_SOAK_SEED", str(random.SystemRandom().randrange(1 << 31))))


def check(figures: Figures) -> None:
    assert (figures.hangs, figures.lost, figures.duplicated, figures.unknown_losses) == (0, 0, 0, 0)
    assert figures.replicas_equal
    assert figures.loss_difference < 1e-3, "the curve of an undisturbed run"
    assert figures.weight_difference < 1e-3


def test_a_few_kills() -> None:
    figures = soak(3, 5)
    check(figures)
    assert figures.kills.total() == 3
    assert figures.kills["trainer"] == 1, "of this seed, first"
    assert figures.kills["worker"] >= 1
    assert (figures.took_over, figures.from_checkpoint) == (1, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills() -> None:
    figures = soak(KILLS, SEED)
    check(figures)
    assert figures.took_over > figures.from_checkpoint, "a whole replica survives most kills"
