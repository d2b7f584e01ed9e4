"""Optimizers by name: what travels is checked on both ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.optim import OptimizerSpec, build_optimizer, set_learning_rate


def test_adamw_equals_torch() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    spec = OptimizerSpec(name="adamw", lr=0.1, options={"betas": [0.8, 0.9], "weight_decay": 0.2, "eps": 1e-6})
    mine = build_optimizer(OptimizerSpec.from_json(spec.to_json()), [ours])
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-6)
    assert mine is not None
    for step in range(3):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            parameter.grad = torch.arange(3.0) + step
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_the_learning_rate_can_change() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = build_optimizer(OptimizerSpec(name="sgd", lr=1.0), [parameter])
    assert optimizer is not None
    set_learning_rate(optimizer, 0.25)
    parameter.grad = torch.ones(())
    optimizer.step()
    assert parameter.item() == -0.25


def test_nothing_to_train_needs_no_optimizer() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert build_optimizer(OptimizerSpec(name="adamw", lr=0.1), [frozen]) is None
    set_learning_rate(None, 0.1)


@pytest.mark.parametrize(
    ("name", "lr", "options", "says"),
    [
        ("rmsprop", 0.1, {}, "rmsprop.*not implemented"),
        ("adamv", 0.1, {}, "adamv"),
        ("sgd", -1.0, {}, "lr=-1.0"),
        ("sgd", float("nan"), {}, "lr=nan"),
        ("sgd", 0.1, {"betas": [0.1, 0.2]}, "betas.*does not take"),
        ("adamw", 0.1, {"betas": [0.1, 1.0]}, "betas"),
        ("adamw", 0.1, {"betas": "ab"}, "betas"),
        ("adamw", 0.1, {"eps": -1e-8}, "eps"),
        ("adamw", 0.1, {"weight_decay": True}, "weight_decay"),
        ("sgd", 0.1, {"nesterov": 1}, "nesterov"),
    ],
)
def test_wrong_words_are_refused(name: str, lr: float, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OptimizerSpec(name=name, lr=lr, options=options)


def test_a_known_but_missing_optimizer_is_unsupported() -> None:
    with pytest.raises(UnsupportedOptionError):
        OptimizerSpec(name="lbfgs", lr=0.1)


def test_options_that_torch_refuses_are_mapped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match="sgd"):
        build_optimizer(OptimizerSpec(name="sgd", lr=0.1, options={"nesterov": True}), [parameter])


@pytest.mark.parametrize(
    "data", [{}, {"name": "sgd"}, {"name": 3, "lr": 0.1, "options": {}}, {"name": "sgd", "lr": 1, "options": 3}]
)
def test_foreign_words_are_checked(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OptimizerSpec.from_json(data)
