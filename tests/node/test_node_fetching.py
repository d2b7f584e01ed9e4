"""Weights travel from a rank that has them to one that joins, over real connections, and are checked when they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from node_kit import planes_of
from torch import Tensor, nn

from distensor.core import SYSTEM_CLOCK
from distensor.core.errors import DistensorError
from distensor.node import snapshots
from distensor.node.engine import ShardEngine
from distensor.node.fetching import Fetcher, Givers
from distensor.node.filling import Filling
from distensor.optim import OptimizerSpec
from distensor.optim.updater import Updater
from distensor.transport import DataPlane
from distensor.transport.driver import PIECE_BYTES

SPEC = OptimizerSpec(name="adamw", lr=0.1, options={})
LARGE = PIECE_BYTES // 4 * 2 + 3


class Held:
    """What is needed of an engine."""

    def __init__(self, *, empty: bool) -> None:
        draw = torch.Generator().manual_seed(3)
        values = {"0/large": torch.randn(LARGE, generator=draw), "0/small": torch.randn(2, 3, generator=draw)}
        self.own = {key: nn.Parameter(value.mul(0.0 if empty else 1.0)) for key, value in values.items()}
        self.own["0/none"] = nn.Parameter(torch.zeros(0, 4))
        self.buffer = torch.zeros(2) if empty else torch.ones(2)
        self.weights: dict[str, Tensor] = {**self.own, "0/buffer": self.buffer}
        self.updater = Updater(SPEC, self.own)
        self.filling = Filling(self.weights, self.updater) if empty else None

    def train(self) -> None:
        for parameter in self.own.values():
            parameter.grad = torch.ones_like(parameter)
        self.updater.step(0.1)

    def everything_of(self, keys: Sequence[str]) -> tuple[dict[str, Tensor], Any]:
        return {key: self.weights[key] for key in keys}, {
            key: fields for key, fields in self.updater.state().items() if key in keys
        }

    def sizes_of(self, key: str) -> dict[str, int]:
        size = self.weights[key].numel()
        if key == "0/buffer":
            return {"": size}
        return {"": size, "exp_avg": size, "exp_avg_sq": size, "step": 1}

    def fill(self, key: str, weight: Tensor, fields: dict[str, Tensor]) -> None:
        assert self.filling is not None
        self.filling.fill(key, weight, fields)


def engine(held: Held) -> ShardEngine:
    return cast("ShardEngine", held)


@pytest.fixture
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(2) as opened:
        yield opened


def fetch(planes: dict[int, DataPlane], source: Held, joiner: Held) -> None:
    """One round: order, copy, fetch, take over."""
    givers, fetcher = Givers(planes[0]), Fetcher(planes[1], SYSTEM_CLOCK)
    number, wanted = fetcher.order(engine(joiner), [0])
    givers.offer(engine(source), 1, number, wanted[0])
    assert fetcher.busy
    fetcher.admit(engine(joiner))
    assert fetcher.busy, "the copies are being made; nothing was asked for yet"
    source.train()  # after the copy: it is of the moment before
    fetcher.begin()
    (under_way,) = fetcher._under_way
    assert under_way.thread is not None
    under_way.thread.join(30)
    fetcher.admit(engine(joiner))
    assert not fetcher.busy


def take_round(
    fetcher: Fetcher, joiner: Held, sources: list[int], givers: dict[int, Givers], held: dict[int, Held]
) -> None:
    """Order, copy at those of `held`, fetch, take over."""
    number, wanted = fetcher.order(engine(joiner), sources)
    assert wanted.keys() == held.keys()
    for source, keys in wanted.items():
        givers[source].offer(engine(held[source]), 1, number, keys)
    fetcher.begin()
    for under_way in fetcher._under_way:
        assert under_way.thread is not None
        under_way.thread.join(30)
    fetcher.admit(engine(joiner))


@pytest.mark.parametrize("trained", [True, False], ids=["with state", "never updated"])
def test_what_comes_is_what_the_source_held_when_it_copied(planes: dict[int, DataPlane], trained: bool) -> None:
    source, expected, joiner = Held(empty=False), Held(empty=False), Held(empty=True)
    if trained:
        source.train()
        expected.train()
    fetch(planes, source, joiner)
    assert joiner.filling is not None
    assert joiner.filling.left == 0
    assert all(torch.equal(joiner.weights[key], expected.weights[key]) for key in expected.weights)
    theirs = expected.updater.state()
    for key, fields in joiner.updater.state().items():
        assert fields.keys() == theirs[key].keys()
        assert all(torch.equal(value, theirs[key][name]) for name, value in fields.items())


def wrong_hash(_: Held) -> str:
    return "rank 0 sent '0/large', and it is not what its hash says"


def too_many_elements(source: Held) -> str:
    source.weights["0/large"] = torch.zeros(LARGE + 1)
    return f"of shape .{LARGE + 1}.; expected at most {LARGE}"


def another_dtype(source: Held) -> str:
    source.weights["0/small"] = torch.zeros(2, 3, dtype=torch.float64)
    return r"'0/small' came as \(2, 3\) torch.float64"


def wrong_state(source: Held) -> str:
    source.train()
    source.updater.state()["0/large"]["exp_avg"].resize_(2)
    return "exp_avg"


@pytest.mark.parametrize("spoil", [wrong_hash, too_many_elements, another_dtype, wrong_state])
def test_what_is_not_what_was_asked_for_is_asked_of_another(
    spoil: Callable[[Held], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good, joiner = Held(empty=False), Held(empty=False), Held(empty=True)
    words = spoil(bad)
    with planes_of(3) as planes:
        givers = {0: Givers(planes[0]), 2: Givers(planes[2])}
        fetcher = Fetcher(planes[1], SYSTEM_CLOCK)
        with monkeypatch.context() as patched:
            if spoil is wrong_hash:
                patched.setattr(snapshots, "hash_of", lambda _: "0" * 64)
            take_round(fetcher, joiner, [0], givers, {0: bad})
        assert re.search(words, caplog.text)
        assert joiner.filling is not None
        assert joiner.filling.left > 0
        with pytest.raises(DistensorError, match=words):
            fetcher.order(engine(joiner), [0])
        take_round(fetcher, joiner, [0, 2], givers, {2: good})
    assert joiner.filling.left == 0
    assert all(torch.equal(joiner.weights[key], good.weights[key]) for key in good.weights)


def test_a_source_that_goes_away_is_told_of(planes: dict[int, DataPlane]) -> None:
    joiner = Held(empty=True)
    fetcher = Fetcher(planes[1], SYSTEM_CLOCK)
    fetcher.order(engine(joiner), [0])
    fetcher.begin()
    (under_way,) = fetcher._under_way
    planes[0].close()
    assert under_way.thread is not None
    under_way.thread.join(30)
    with pytest.raises(DistensorError, match="rank 0"):
        fetcher.admit(engine(joiner))
    assert joiner.filling is not None
    joiner.filling.give_up_orders()
    assert joiner.filling.left == 4
