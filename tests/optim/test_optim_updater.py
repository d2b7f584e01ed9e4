"""One rank's updates: torch's own steps, masters of half-precision weights, the moving average, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distensor.core.errors import ConfigError
from distensor.optim import OptimizerSpec
from distensor.optim.build import FUSED
from distensor.optim.sparse_spec import SparseRule, SparseSpec
from distensor.optim.spec import OPTIONS
from distensor.optim.updater import Updater, name_of, state_layout


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return {
        "0/a.weight": nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype)),
        "1/b.weight": nn.Parameter(torch.randn(2, 5, generator=generator).to(dtype)),
        "1/frozen": nn.Parameter(torch.ones(2).to(dtype), requires_grad=False),
    }


def give_gradients(own: Mapping[str, Tensor], step: int) -> None:
    for key, parameter in own.items():
        if parameter.requires_grad:
            size = parameter.numel()
            gradient = torch.linspace(-1.0, 1.0 + len(key) / 10 + step, size).view(parameter.shape)
            parameter.grad = gradient.to(parameter.dtype)


def run(updater: Updater, own: Mapping[str, Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(own, step)
        updater.step(0.01 * (step + 1), 0.5)


OPTION: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "adamw": {"amsgrad": True},
}


def spec_of(name: str, **words: Any) -> OptimizerSpec:
    return OptimizerSpec(name=name, lr=0.1, options=OPTION.get(name, {}), **words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_state_moves_to_another_rank_and_goes_on_to_the_bit(name: str, dtype: torch.dtype) -> None:
    straight, first, second = parameters(dtype), parameters(dtype), parameters(dtype)
    spec = spec_of(name, ema=0.9)
    uninterrupted, before, after = (Updater(spec, own) for own in (straight, first, second))
    run(uninterrupted, straight, range(6))
    run(before, first, range(3))
    state = {key: {field: value.clone() for field, value in fields.items()} for key, fields in before.state().items()}
    for key, fields in state.items():
        own = first[key]
        expected = state_layout(spec, own.dtype, tuple(own.shape))
        assert {field: (value.dtype, tuple(value.shape)) for field, value in fields.items()} == expected
    with torch.no_grad():
        for key, parameter in second.items():
            parameter.copy_(first[key])
    after.load_state(state)
    run(after, second, range(3, 6))
    for key in straight:
        assert torch.equal(straight[key], second[key]), key
    for key, fields in uninterrupted.state().items():
        for field, value in fields.items():
            assert torch.equal(value, after.state()[key][field]), (key, field)


def test_a_parameter_without_a_gradient_stays_and_has_no_state() -> None:
    own = parameters()
    updater = Updater(spec_of("adamw"), own)
    before = own["1/b.weight"].detach().clone()
    give_gradients(own, 0)
    own["1/b.weight"].grad = None
    updater.step(0.1)
    assert torch.equal(own["1/b.weight"], before)
    assert {key: bool(fields) for key, fields in updater.state().items()} == {"0/a.weight": True, "1/b.weight": False}
    other = Updater(spec_of("adamw"), parameters())
    other.load_state(updater.state())
    assert other.state()["1/b.weight"] == {}


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    own = parameters()
    updater = Updater(spec_of("adamw", ema=0.5), own)
    run(updater, own, range(1))
    good = updater.state()
    fields = good["0/a.weight"]
    for wrong, says in (
        ({"0/a.weight": fields}, r"lacks \['1/b.weight'\]"),
        ({**good, "2/c": fields}, r"holds \['2/c'\]"),
        ({**good, "0/a.weight": {**fields, "extra": torch.zeros(())}}, "'0/a.weight' has.*extra"),
        ({**good, "0/a.weight": {"step": fields["step"]}}, r"'0/a.weight' has \['step'\]; expected.*exp_avg"),
        ({**good, "0/a.weight": {**fields, "exp_avg": torch.zeros(3, 4)}}, r"exp_avg is.*\(3, 4\).*\(4, 3\)"),
        ({**good, "0/a.weight": {**fields, "exp_avg": torch.zeros(4, 3).double()}}, "exp_avg is torch.float64"),
    ):
        with pytest.raises(ConfigError, match=says):
            updater.load_state(wrong)


class TestHalfPrecision:
    """DTY-03: updates below the resolution of a bf16 weight are kept in a master copy."""

    def weight(self, steps: int) -> Tensor:
        weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        updater = Updater(OptimizerSpec(name="sgd", lr=1e-3), {"w": weight})
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            updater.step(1e-3)
        return weight.detach()

    def test_a_hundred_small_updates_arrive(self) -> None:
        assert self.weight(100).item() == torch.tensor(0.9).bfloat16().item()

    def test_without_a_master_they_would_be_lost(self) -> None:
        weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        plain = torch.optim.SGD([weight], lr=1e-3)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            plain.step()
        assert weight.item() == 1.0

    def test_master_and_optimizer_state_are_fp32(self) -> None:
        own = parameters(torch.bfloat16)
        updater = Updater(spec_of("adamw", ema=0.9), own)
        run(updater, own, range(2))
        for key, fields in updater.state().items():
            assert {value.dtype for value in fields.values()} == {torch.float32}
            assert torch.equal(fields["master"].bfloat16(), own[key])

    def test_fp64_stays_fp64(self) -> None:
        own = parameters(torch.float64)
        updater = Updater(spec_of("adamw", ema=0.9), own)
        run(updater, own, range(1))
        assert updater.state()["0/a.weight"].keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "ema"}
        assert updater.state()["0/a.weight"]["ema"].dtype is torch.float64


class TestAverage:
    def test_the_arithmetic_of_the_oracle(self) -> None:
        """A source that stands at w and b while the average starts at ones and zeros, decay 0.9, two updates."""
        own = {"w": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.zeros(2))}
        updater = Updater(OptimizerSpec(name="sgd", lr=0.0, ema=0.9), own)
        with torch.no_grad():
            own["w"].copy_(torch.tensor([[2.0, 4.0], [6.0, 8.0]]))
            own["b"].copy_(torch.tensor([1.0, -1.0]))
        updater.step(0.0)
        assert updater.averages()["w"].tolist() == [
            [1.100000023841858, 1.2999999523162842],
            [1.5, 1.7000000476837158],
        ]
        assert updater.averages()["b"].tolist() == [0.10000000149011612, -0.10000000149011612]
        updater.step(0.0)
        assert updater.averages()["w"].tolist() == [
            [1.190000057220459, 1.5699999332427979],
            [1.9499999284744263, 2.3299999237060547],
        ]

    def test_it_follows_the_master_not_the_rounded_weight(self) -> None:
        own = {"w": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))}
        updater = Updater(OptimizerSpec(name="sgd", lr=0.1, ema=0.5), own)
        own["w"].grad = torch.ones(1, dtype=torch.bfloat16)
        updater.step(1e-3)
        assert updater.averages()["w"].item() == pytest.approx(0.9995, rel=1e-6)
        assert own["w"].item() == 1.0

    def test_without_the_word_there_is_none(self) -> None:
        own = parameters()
        assert Updater(spec_of("sgd"), own).averages() == {}

    def test_weights_from_outside_start_it_anew(self) -> None:
        own = parameters()
        updater = Updater(spec_of("sgd", ema=0.9), own)
        run(updater, own, range(2))
        with torch.no_grad():
            own["0/a.weight"].fill_(7.0)
        before = updater.averages()["1/b.weight"].clone()
        updater.refresh({"0/a.weight", "1/frozen"})
        assert torch.equal(updater.averages()["0/a.weight"], torch.full((4, 3), 7.0))
        assert torch.equal(updater.averages()["1/b.weight"], before), "nobody touched this one"

    def test_so_does_the_master(self) -> None:
        own = parameters(torch.bfloat16)
        updater = Updater(spec_of("sgd"), own)
        with torch.no_grad():
            own["0/a.weight"].fill_(7.0)
        updater.refresh({"0/a.weight"})
        assert torch.equal(updater.state()["0/a.weight"]["master"], torch.full((4, 3), 7.0))


def test_no_decay_goes_by_the_name_after_the_stage() -> None:
    own = parameters()
    before = {key: parameter.detach().clone() for key, parameter in own.items()}
    spec = OptimizerSpec(name="adamw", lr=0.1, options={"weight_decay": 0.5}, no_decay=("b.weight",))
    updater = Updater(spec, own)
    for key in ("0/a.weight", "1/b.weight"):
        own[key].grad = torch.zeros_like(own[key])
    updater.step(0.1)
    assert not torch.equal(own["0/a.weight"], before["0/a.weight"])
    assert torch.equal(own["1/b.weight"], before["1/b.weight"])
    assert name_of("3/x.y") == name_of("x.y") == "x.y"


def test_bytes_are_those_of_the_state() -> None:
    own = parameters()
    updater = Updater(spec_of("sgd", ema=0.9), own)
    assert updater.bytes == 4 * 22
    run(updater, own, range(1))
    assert updater.bytes == 2 * 4 * 22


def test_nothing_to_train_is_no_error() -> None:
    updater = Updater(spec_of("adamw", ema=0.9), {"0/frozen": nn.Parameter(torch.ones(1), requires_grad=False)})
    updater.step(0.1)
    updater.load_state({})
    assert (updater.state(), updater.averages(), updater.bytes) == ({}, {}, 0)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_one_kernel_gives_what_torch_gives_step_by_step(name: str) -> None:
    """Of an element one rounding at a time may differ, and no more after many steps."""
    options = {"weight_decay": 0.1, "betas": [0.8, 0.95], "amsgrad": True}
    generator = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(1003, generator=generator))
    plain = nn.Parameter(weight.detach().clone())
    updater = Updater(OptimizerSpec(name=name, lr=1e-2, options=options), {"w": weight})
    classes = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    reference = classes[name]([plain], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), amsgrad=True, fused=False)
    for _ in range(20):
        gradient = torch.randn(1003, generator=generator)
        weight.grad, plain.grad = gradient.clone(), gradient.clone()
        updater.step(1e-2)
        reference.step()
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=1e-7)


def test_copies_on_machines_of_other_sizes_keep_the_same_bits() -> None:
    """Replicas hold the same weight with another number of threads, and tied copies in other stages."""
    threads = torch.get_num_threads()

    def after(count: int) -> Tensor:
        torch.set_num_threads(count)
        generator = torch.Generator().manual_seed(4)
        weight = nn.Parameter(torch.randn(70_001, generator=generator))
        updater = Updater(spec_of("adamw"), {"w": weight})
        for _ in range(5):
            weight.grad = torch.randn(70_001, generator=generator)
            updater.step(1e-2, 0.37)
        return weight.detach()

    try:
        first, *others = [after(count) for count in (1, 2, 3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


LOCAL_SPECS = {
    "diloco": SparseSpec(rule=SparseRule.DILOCO, every=2, outer_lr=0.7, outer_momentum=0.9),
    "sparseloco": SparseSpec(rule=SparseRule.SPARSELOCO, every=2, k=4, chunk=16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOCAL_SPECS)
def test_steps_of_ones_own_leave_what_all_have_in_common(name: str, dtype: torch.dtype) -> None:
    """Until an exchange: the parameters move, the common weights and their average stay; state goes on from between."""
    spec = OptimizerSpec(name="adamw", lr=0.1, ema=0.5, sparse=LOCAL_SPECS[name])
    own = parameters(dtype)
    updater = Updater(spec, own)
    start = {key: p.detach().clone() for key, p in own.items()}
    give_gradients(own, 0)
    updater.step(0.1, 1.0, exchange=False)
    common = updater.common()
    trained = ["0/a.weight", "1/b.weight"]
    assert sorted(common) == trained
    assert all(torch.equal(common[key], start[key]) and not torch.equal(own[key], start[key]) for key in trained)
    assert all(torch.equal(updater.averages()[key], start[key].float()) for key in trained)
    moved = {key: own[key].detach().clone() for key in trained}
    with updater.at_common():
        assert all(torch.equal(own[key], start[key]) for key in trained)
    assert all(torch.equal(own[key], moved[key]) for key in trained)
    # Adam's two moments, the anchor and its momentum (or a residual), the average; a counter; masters of bf16 weights.
    masters = 0 if dtype is torch.float32 else 4 * 22
    assert updater.bytes == 5 * 4 * 22 + 2 * 4 + masters

    others = {key: nn.Parameter(value.clone(), requires_grad=key != "1/frozen") for key, value in start.items()}
    resumed = Updater(spec, others)
    resumed.load_state({key: {f: v.clone() for f, v in fields.items()} for key, fields in updater.state().items()})
    assert all(torch.equal(others[key], moved[key]) for key in trained)
    for each, weights in ((updater, own), (resumed, others)):
        give_gradients(weights, 1)
        each.step(0.1, 1.0, exchange=True)
    assert all(torch.equal(own[key], others[key]) for key in trained)
    assert all(torch.equal(updater.common()[key], own[key]) for key in trained)
    with torch.no_grad():
        own["0/a.weight"].fill_(2.0)
    updater.refresh({"0/a.weight"})
    assert torch.equal(updater.common()["0/a.weight"], torch.full_like(start["0/a.weight"], 2.0))
