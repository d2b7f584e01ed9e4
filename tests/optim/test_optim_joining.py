"""A replica that lost an exchange, or that is new, stands where the others stand; an exchange that fails is undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distensor.core.errors import ConfigError, PeerLostError
from distensor.optim import OptimizerSpec
from distensor.optim.distro import Exchange
from distensor.optim.distro.exchange import Alone
from distensor.optim.sparse_spec import LOCAL, SparseRule, SparseSpec
from distensor.optim.updater import Updater

TILES: dict[str, Any] = {"k": 4, "chunk": 16}
RULES = {
    "distro": SparseSpec(rule=SparseRule.DISTRO, **TILES),
    "demo": SparseSpec(rule=SparseRule.DEMO, **TILES),
    "late": SparseSpec(rule=SparseRule.DISTRO, delay=True, **TILES),
    "diloco": SparseSpec(rule=SparseRule.DILOCO, every=2, outer_lr=0.7, outer_momentum=0.9),
    "sparseloco": SparseSpec(rule=SparseRule.SPARSELOCO, every=2, feedback=0.9, **TILES),
}


class Breaking(Alone):
    """The other replica goes away when it is told to."""

    broken = False

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        self._check()
        return super().gather(message)

    def mean(self, tensor: Tensor) -> None:
        self._check()
        super().mean(tensor)

    def _check(self) -> None:
        if self.broken:
            raise PeerLostError(1, "gone")


def replica(
    rule: str, exchange: Exchange | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Updater, dict[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(2)
    own = {
        "0/a": nn.Parameter(torch.randn(6, 8, generator=generator).to(dtype)),
        "0/b": nn.Parameter(torch.randn(5, generator=generator).to(dtype)),
    }
    return Updater(OptimizerSpec(name="adamw", lr=0.1, sparse=RULES[rule], ema=0.5), own, exchange), own


def step(updater: Updater, own: dict[str, nn.Parameter], seed: int, *, exchange: bool = True) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in own.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    updater.step(0.02, exchange=exchange)


def common(updater: Updater, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in {**own, **updater.common()}.items()}


def copied(updater: Updater) -> dict[str, dict[str, Tensor]]:
    return {key: {name: t.clone() for name, t in fields.items()} for key, fields in updater.handed_on().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fresh", [True, False], ids=["new", "behind"])
def test_it_stands_where_the_source_stands(rule: str, fresh: bool, dtype: torch.dtype) -> None:
    source, of_source = replica(rule, dtype=dtype)
    other, of_other = replica(rule, dtype=dtype)
    for turn in range(4):
        step(source, of_source, turn, exchange=turn % 2 == 1)
        if not fresh and turn < 3:
            step(other, of_other, 10 + turn, exchange=turn % 2 == 1)
    step(source, of_source, 9, exchange=False)
    source.settle()
    other.settle()
    before = {key: {n: t.clone() for n, t in fields.items()} for key, fields in other.state().items()}
    assert other.exchanges < source.exchanges
    other.adopt(common(source, of_source), copied(source), source.exchanges, fresh=fresh)
    assert other.exchanges == source.exchanges
    ours, theirs = common(other, of_other), common(source, of_source)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(torch.equal(own.detach(), ours[key]) for key, own in of_other.items()), "no step of its own is left"
    for key, fields in other.state().items():
        if "residual" in fields:
            kept = torch.zeros_like(fields["residual"]) if fresh else before[key]["residual"]
            assert torch.equal(fields["residual"], kept)
        assert torch.equal(fields["ema"], source.state()[key]["ema"])
    step(other, of_other, 5)  # and it goes on


def test_nothing_of_a_replicas_own_is_handed_on() -> None:
    for rule in RULES:
        updater, own = replica(rule)
        step(updater, own, 1)
        updater.settle()
        assert not {LOCAL, "residual"} & {name for fields in updater.handed_on().values() for name in fields}


def test_state_of_others_is_checked_before_it_is_taken() -> None:
    updater, own = replica("distro")
    step(updater, own, 1)
    state = copied(updater)
    state["0/a"]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ConfigError, match="exp_avg_sq"):
        updater.adopt({}, state, 1, fresh=True)
    with pytest.raises(ConfigError, match="lacks"):
        updater.adopt({}, {"0/a": {}}, 1, fresh=True)


@pytest.mark.parametrize("rule", ["distro", "demo", "sparseloco", "diloco"])
def test_an_exchange_that_fails_takes_nothing_out_of_the_residual(rule: str) -> None:
    """What came of the step's gradients stays in the residual, and goes out with the next message."""
    exchange = Breaking()
    updater, own = replica(rule, exchange)
    step(updater, own, 1)
    before, done = common(updater, own), updater.exchanges
    exchange.broken = True
    with pytest.raises(PeerLostError):
        step(updater, own, 2)
    assert updater.exchanges == done
    if rule in ("distro", "demo"):
        assert all(torch.equal(before[key], tensor) for key, tensor in common(updater, own).items())
    exchange.broken = False
    if rule == "sparseloco":
        change = updater.state()["0/a"]
        assert float((change["anchor"] - change["local"]).abs().max()) > 0
    updater.exchange() if rule in ("sparseloco", "diloco") else step(updater, own, 3)
    assert updater.exchanges == done + 1


@pytest.mark.parametrize("arrives", [True, False], ids=["whole", "not at all"])
def test_one_that_is_on_its_way_is_ended_when_members_change(arrives: bool) -> None:
    exchange = Breaking()
    updater, own = replica("late", exchange)
    step(updater, own, 1)
    updater.settle()
    before = common(updater, own)
    exchange.broken = not arrives
    step(updater, own, 2)
    assert not torch.equal(own["0/a"].detach(), before["0/a"]), "it looks ahead"
    updater.part()
    assert updater.exchanges == 1 + arrives
    same = all(torch.equal(before[key], own[key].detach()) for key in before)
    assert same is not arrives, "where nothing came, the weights are those that all have"
