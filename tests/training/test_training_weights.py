"""Weights that lose small updates are named before a run starts (case DTY-03)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import Trainer
from distensor.training.weights import RoundedUpdatesWarning, warn_of_rounded_updates


def test_a_trainer_warns_of_trained_weights_of_bfloat16() -> None:
    model = DistributedModel(nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.warns(RoundedUpdatesWarning, match=r"2 trained parameters, 'weight' first, are torch\.bfloat16"):
        Trainer(model, parallel=ParallelConfig(), precision="bf16")


def test_float32_and_frozen_weights_are_quiet() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_rounded_updates(module)
