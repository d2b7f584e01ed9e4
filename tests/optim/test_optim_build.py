"""Optimizers by name: what travels is checked on both ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.optim import OptimizerSpec, build_optimizer, make_spec, set_learning_rate
from distensor.optim.spec import OPTIONS


def test_adamw_equals_torch() -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    spec = OptimizerSpec(name="adamw", lr=0.1, options={"betas": [0.8, 0.9], "weight_decay": 0.2, "eps": 1e-6})
    mine = build_optimizer(OptimizerSpec.from_json(spec.to_json()), {"ours": ours})
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-6)
    assert mine is not None
    for step in range(3):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            parameter.grad = torch.arange(3.0) + step
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_the_learning_rate_can_change() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = build_optimizer(OptimizerSpec(name="sgd", lr=1.0), {"weight": parameter})
    assert optimizer is not None
    set_learning_rate(optimizer, 0.25)
    parameter.grad = torch.ones(())
    optimizer.step()
    assert parameter.item() == -0.25


def test_nothing_to_train_needs_no_optimizer() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert build_optimizer(OptimizerSpec(name="adamw", lr=0.1), {"weight": frozen}) is None
    set_learning_rate(None, 0.1)


@pytest.mark.parametrize(
    ("name", "lr", "options", "says"),
    [
        ("lbfgs", 0.1, {}, "lbfgs.*several times within a step"),
        ("adamv", 0.1, {}, "adamv"),
        ("sgd", -1.0, {}, "lr=-1.0"),
        ("sgd", float("nan"), {}, "lr=nan"),
        ("sgd", 0.1, {"betas": [0.1, 0.2]}, "betas.*does not take"),
        ("adamw", 0.1, {"betas": [0.1, 1.0]}, "betas"),
        ("adamw", 0.1, {"betas": "ab"}, "betas"),
        ("adamw", 0.1, {"eps": -1e-8}, "eps"),
        ("adamw", 0.1, {"weight_decay": True}, "weight_decay"),
        ("sgd", 0.1, {"nesterov": 1}, "nesterov"),
        ("sgd", 0.1, {"fused": True}, "fused.*does not take"),
        ("rmsprop", 0.1, {"alpha": 1.0}, r"alpha.*\[0, 1\)"),
        ("rprop", 0.1, {"etas": [0.5]}, "etas.*two numbers"),
        ("adafactor", 0.1, {"eps": [None, -1.0]}, "eps.*two numbers"),
        ("muon", 0.1, {"ns_steps": 10**9}, "ns_steps.*1 to 99"),
        ("muon", 0.1, {"adjust_lr_fn": "mine"}, "adjust_lr_fn.*original"),
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
        build_optimizer(OptimizerSpec(name="sgd", lr=0.1, options={"nesterov": True}), {"weight": parameter})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"name": "sgd"},
        {"name": 3, "lr": 0.1, "options": {}},
        {"name": "sgd", "lr": 1, "options": 3},
        {"name": "sgd", "lr": 1, "options": {}, "no_decay": "weight"},
        {"name": "sgd", "lr": 1, "options": {}, "no_decay": [3]},
        {"name": "sgd", "lr": 1, "options": {}, "ema": 1.0},
        {"name": "sgd", "lr": 1, "options": {}, "ema": "0.9"},
    ],
)
def test_foreign_words_are_checked(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OptimizerSpec.from_json(data)


EVERY_OPTION: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True},
    "adam": {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True, "decoupled_weight_decay": True},
    "adamw": {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    "nadam": {"momentum_decay": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "radam": {"betas": [0.5, 0.6], "decoupled_weight_decay": True, "weight_decay": 0.1},
    "adamax": {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
    "adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-6, "weight_decay": 0.1},
    "adadelta": {"rho": 0.8, "eps": 1e-5, "weight_decay": 0.1},
    "rmsprop": {"alpha": 0.8, "momentum": 0.9, "centered": True, "eps": 1e-6, "weight_decay": 0.1},
    "asgd": {"lambd": 1e-3, "alpha": 0.5, "t0": 1.0, "weight_decay": 0.1},
    "rprop": {"etas": [0.4, 1.3], "step_sizes": [1e-5, 10]},
    "adafactor": {"beta2_decay": -0.5, "eps": [None, 1e-2], "d": 2.0, "weight_decay": 0.1},
    "muon": {"momentum": 0.9, "nesterov": False, "ns_coefficients": [3.0, -4.0, 2.0], "ns_steps": 3, "eps": 1e-6},
}
CLASSES = {"sgd": "SGD", "adamw": "AdamW", "nadam": "NAdam", "radam": "RAdam", "rmsprop": "RMSprop", "asgd": "ASGD"}


def class_of(name: str) -> Any:
    return getattr(torch.optim, CLASSES.get(name, name.capitalize()))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("defaults", [True, False])
def test_every_optimizer_is_torchs_own(name: str, defaults: bool) -> None:
    options = {} if defaults else EVERY_OPTION[name]
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    spec = make_spec(name, 0.1, options, None, {"w": ours})
    mine = build_optimizer(OptimizerSpec.from_json(spec.to_json()), {"w": ours})
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    reference = class_of(name)([theirs], lr=0.1, **given)
    assert type(mine) is type(reference)
    for step in range(3):
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            assert optimizer is not None
            parameter.grad = torch.linspace(-1.0, 2.0, 12).view(4, 3) * (step + 1)
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_patterns_keep_weight_decay_off() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    named = dict(layer.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    spec = make_spec("adamw", 0.1, {"weight_decay": 0.5, "no_decay": ["**.bias", "1"]}, None, named)
    assert spec.no_decay == ("0.bias", "1.bias", "1.weight")
    optimizer = build_optimizer(OptimizerSpec.from_json(spec.to_json()), named)
    assert optimizer is not None
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = [name for name, parameter in named.items() if not torch.equal(parameter, before[name])]
    assert changed == ["0.weight"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("adamw", {"no_decay": ["nrom"]}, "'nrom'.*nearest.*norm"),
        ("adamw", {"no_decay": "norm"}, "list of patterns"),
        ("adamw", {"no_decay": ["a..b"]}, "empty name"),
        ("rprop", {"no_decay": ["norm"]}, "rprop has no weight decay"),
        ("muon", {}, "muon.*'norm.weight'.*number of dims"),
        ("sgd", {"nesterov": True}, "sgd"),
    ],
)
def test_words_that_do_not_fit_the_model_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    parameters = {"norm.weight": torch.nn.Parameter(torch.ones(2)), "up.weight": torch.nn.Parameter(torch.ones(2, 2))}
    with pytest.raises(ConfigError, match=says):
        make_spec(name, 0.1, options, None, parameters)


def test_optimizers_that_need_whole_weights_say_so() -> None:
    for name in OPTIONS:
        spec = OptimizerSpec(name=name, lr=0.1)
        if spec.elementwise:
            spec.require_elementwise("sync='zero3'")
        else:
            with pytest.raises(UnsupportedOptionError, match=f"{name}.*zero3.*slice.*adamw"):
                spec.require_elementwise("sync='zero3'")
    assert [name for name in OPTIONS if not OptimizerSpec(name=name, lr=0.1).elementwise] == ["adafactor", "muon"]


@pytest.mark.parametrize("name", [name for name in OPTIONS if OptimizerSpec(name=name, lr=0.1).elementwise])
def test_an_elementwise_optimizer_gives_slices_what_it_gives_the_whole(name: str) -> None:
    """What `elementwise` promises, tried: the update of a slice is the slice of the update."""
    start = torch.randn(6, 3, generator=torch.Generator().manual_seed(2))
    whole = torch.nn.Parameter(start.clone())
    slices = [torch.nn.Parameter(piece.clone()) for piece in torch.split(start, [1, 5])]
    spec = OptimizerSpec(name=name, lr=0.1, options=EVERY_OPTION[name])
    optimizers = [build_optimizer(spec, {"w": parameter}) for parameter in (whole, *slices)]
    for step in range(3):
        gradient = torch.linspace(-1.0, 2.0, 18).view(6, 3) * (step + 1)
        for parameter, own in zip((whole, *slices), (gradient, *torch.split(gradient, [1, 5])), strict=True):
            parameter.grad = own.clone()
        for optimizer in optimizers:
            assert optimizer is not None
            optimizer.step()
    torch.testing.assert_close(torch.cat([*slices]), whole, rtol=0, atol=1e-6)


def test_the_documentation_lists_every_optimizer_with_its_options() -> None:
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", text, flags=re.MULTILINE))
    rows.pop("name")
    assert {name: row.split(", ") for name, row in rows.items()} == {
        name: list(known) for name, known in OPTIONS.items()
    }
