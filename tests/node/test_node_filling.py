"""A rank whose weights come while the others train ends with what they hold, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.node.filling import FIRST_ORDER_BYTES, Filling
from distensor.node.step_report import Update
from distensor.optim import OptimizerSpec
from distensor.optim.spec import OPTIONS
from distensor.optim.updater import Updater

KEYS = ("0/a", "0/b", "0/c", "0/frozen", "0/buffer")


class Rank:
    """Weights, a buffer and an optimizer; empty, or as they are at the start."""

    def __init__(self, spec: OptimizerSpec, dtype: torch.dtype, *, empty: bool = False) -> None:
        draw = torch.Generator().manual_seed(1)
        shapes = {"0/a": (4, 6), "0/b": (3, 2), "0/c": (5, 3), "0/frozen": (2, 2)}
        values = {key: torch.randn(shape, generator=draw).to(dtype) for key, shape in shapes.items()}
        self.own = {
            key: nn.Parameter(torch.zeros_like(value) if empty else value, requires_grad=key != "0/frozen")
            for key, value in values.items()
        }
        self.buffer = torch.zeros(3) if empty else torch.ones(3)
        self.updater = Updater(spec, self.own)
        self.weights = {**self.own, "0/buffer": self.buffer}

    def gradients(self, step: int) -> None:
        """The same sums on every rank; of one weight nobody has any in every third step."""
        draw = torch.Generator().manual_seed(100 + step)
        for key, parameter in self.own.items():
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            parameter.grad = gradient if parameter.requires_grad and (key != "0/c" or step % 3) else None


def update(step: int) -> Update:
    return Update(lr=0.01 * (step + 1), scale=0.5 + step / 10, exchange=True)


def copy_of(source: Rank, key: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    state = source.updater.state().get(key, {})
    return source.weights[key].detach().clone(), {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_comes_when_it_ends_equal_to_the_bit(name: str, dtype: torch.dtype) -> None:
    spec = OptimizerSpec(name=name, lr=0.1, options={}, ema=0.9)
    source, joiner = Rank(spec, dtype), Rank(spec, dtype, empty=True)
    filling = Filling(joiner.weights, joiner.updater)
    filling._order_bytes = 1  # one weight at a time
    under_way: dict[str, tuple[int, tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {}
    steps = 0
    while filling.left:
        for (key,) in filling.order([0], in_time=False).values():
            under_way[key] = steps + len(under_way), copy_of(source, key)  # each comes some steps after it was copied
        source.gradients(steps)
        joiner.gradients(steps)
        one = update(steps)
        source.updater.step(one.lr, one.scale)
        filling.carry_out(one)
        steps += 1
        for key, (when, (weight, fields)) in list(under_way.items()):
            if steps > when:
                filling.fill(key, weight, fields)
                del under_way[key]
    assert steps > 3
    assert all(torch.equal(joiner.weights[key], source.weights[key]) for key in KEYS)
    theirs = source.updater.state()
    for key, fields in joiner.updater.state().items():
        assert fields.keys() == theirs[key].keys()
        assert all(torch.equal(value, theirs[key][field]) for field, value in fields.items())


def filling_of(rank: Rank) -> Filling:
    return Filling(rank.weights, rank.updater)


SPEC = OptimizerSpec(name="adamw", lr=0.1, options={})


def test_more_is_ordered_where_it_comes_in_time_and_what_did_not_come_is_ordered_again() -> None:
    filling = filling_of(Rank(SPEC, torch.float32, empty=True))
    filling._order_bytes = 24
    assert filling.order([3, 5], in_time=False) == {3: ["0/a"], 5: ["0/b"]}
    assert filling.order([3], in_time=True) == {3: ["0/c"]}, "one that is larger than the limit comes alone"
    filling.give_up_orders()
    assert filling.left == len(KEYS)
    filling._order_bytes = FIRST_ORDER_BYTES
    assert filling.order([3, 5], in_time=True) == {3: ["0/frozen", "0/buffer", "0/a", "0/b", "0/c"]}
    assert filling.ordered


def test_what_nobody_asked_for_or_does_not_fit_is_refused() -> None:
    rank = Rank(SPEC, torch.float32, empty=True)
    filling = filling_of(rank)
    with pytest.raises(ProgramRejectedError, match="not asked for"):
        filling.fill("0/a", torch.zeros(4, 6), {})
    filling.order([0], in_time=False)
    with pytest.raises(ProgramRejectedError, match="no such weight"):
        filling.fill("0/a", torch.zeros(6, 4), {})
    with pytest.raises(ConfigError, match="exp_avg"):
        filling.fill("0/a", torch.zeros(4, 6), {"exp_avg": torch.zeros(4, 6)})
