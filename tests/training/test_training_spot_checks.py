"""Units that others compute too: who cheats is found as often as was promised, who is honest is never accused."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.nn import DistributedModel
from distensor.node.faults import SCALED, STALE, Cheat, FaultScript, cheat, environment_of, fail_at
from distensor.node.sketch import PERIOD, Sketcher
from distensor.training import Trainer
from distensor.training.spot_checking import SpotChecks
from distensor.training.spot_checks import (
    DEFAULT_RATE,
    TOLERANCES,
    Check,
    Outcome,
    choose,
    difference,
    doubted,
    judge,
    read_sketch,
)

GOOD, BAD, WORSE = {"0/w": (1.0, 2.0)}, {"0/w": (1.5, 2.0)}, {"0/w": (-1.0, 3.0)}
TOLERANCE = TOLERANCES["fp32"]


class Net(nn.Module):
    """inputs (rows, 6) -> logits (rows, 3), with dropout and a weight without a gradient."""

    def __init__(self, drop: float = 0.25) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 3)
        self.drop = nn.Dropout(drop)
        self.frozen = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.tanh(self.first(inputs))) * self.frozen)
        return out


def batches(count: int, rows: int = 9) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


def trainer_of(session: Any, replicas: int, drop: float = 0.25, **options: Any) -> Trainer:
    torch.manual_seed(1)
    parallel = ParallelConfig(data_parallel=replicas)
    loss = lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1])  # noqa: E731  # as a user writes it
    return Trainer(
        DistributedModel(Net(drop)), parallel=parallel, loss=loss, lr=0.01, session=session, progress=False, **options
    )


def run(how: Cheat | None, replicas: int, steps: int, rate: float, **options: Any) -> SpotChecks:
    with thread_session(replicas) as session:
        session.cheat = how
        with trainer_of(session, replicas, spot_checks=rate, **options) as trainer:
            data = iter(batches(steps))
            trainer.step(next(data))
            assert trainer.job is not None
            checks = trainer.job.checks
            checks._draw = random.Random(7)
            for batch in data:
                trainer.step(batch)
            assert len(set(trainer.job.digests())) == 1, "a check changes no weight"
            return checks


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3, "precision": "bf16", "optimizer": "sgd"}])
def test_an_honest_worker_is_never_accused(options: dict[str, Any]) -> None:
    checks = run(None, 3, 60, 1 / 3, **options)
    assert checks.counts.keys() == {Outcome.MATCHED}
    assert checks.counts.total() >= 59
    assert checks.largest == 0.0, "the same arithmetic on the same machine is equal to the bit, dropout included"
    assert not checks.newest
    assert checks.bytes >= 59 * 2 * 3 * (6 * 4 + 8)
    assert checks.seconds > 0
    print(f"{checks.counts.total()} checks, {checks.bytes} bytes, {checks.seconds:.3f} s")


@pytest.mark.slow
def test_an_honest_worker_is_never_accused_for_long() -> None:
    checks = run(None, 4, 1000, 1 / 4, micro_batches=2, clip_norm=0.1)
    assert checks.counts == {Outcome.MATCHED: checks.counts.total()}
    assert checks.counts.total() >= 999
    assert checks.largest == 0.0
    print(f"{checks.counts.total()} checks of 4 replicas, largest difference {checks.largest}")


@pytest.mark.parametrize("how", [cheat(1, SCALED, factor=1.01), cheat(1, STALE, step=3)])
def test_a_cheating_worker_is_found_whenever_it_is_chosen(how: Cheat, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        checks = run(how, 3, 40, 1 / 3, drop=0.0)
    found = [checked for checked in checks.newest if checked.finding.outcome is Outcome.DIFFERENT]
    assert len(found) == len(checks.newest) > 5
    assert {int(checked.unit.rank) for checked in found} == {1}
    assert min(checked.unit.step for checked in found) >= how.step
    assert checks.counts[Outcome.MATCHED] > 10
    assert f"step {found[0].unit.step}: rank 1 did not compute what rank" in caplog.text


def test_of_a_model_that_draws_numbers_a_difference_accuses_nobody() -> None:
    checks = run(cheat(1, SCALED), 3, 40, 1 / 3)
    assert checks.counts.keys() == {Outcome.MATCHED, Outcome.DISPUTED}
    assert all(not checked.liars for checked in checks.newest)


def test_of_two_that_differ_nobody_knows_who_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    checks = run(cheat(0, SCALED), 2, 12, 0.5)
    assert checks.counts.keys() <= {Outcome.MATCHED, Outcome.DISPUTED}
    assert checks.counts[Outcome.DISPUTED] > 0
    assert "nobody can tell who is wrong" in caplog.text


def test_units_are_chosen_as_often_as_was_said_and_nobody_foretells_which() -> None:
    draw, rate, ranks, steps = random.Random(3), 0.02, [0, 2, 3, 5], 20_000
    chosen = [check for _ in range(steps) if (check := choose(rate, ranks, draw)) is not None]
    mean, spread = rate * steps, math.sqrt(steps * rate * (1 - rate))
    for rank in ranks:
        assert abs(sum(check.target == rank for check in chosen) - mean) < 5 * spread
    for check in chosen:
        assert len({check.target, *check.witnesses}) == 3
    assert choose(1.0, [4], draw) is None
    assert choose(0.0, ranks, draw) is None
    assert choose(1.0, [4, 6], draw) in (Check(target=4, witnesses=(6,)), Check(target=6, witnesses=(4,)))
    assert SpotChecks(0.0, TOLERANCE).choose(ranks) is None
    assert isinstance(SpotChecks(0.1, TOLERANCE)._draw, random.SystemRandom)


@pytest.mark.parametrize(
    ("said", "seen", "outcome", "liars"),
    [
        (GOOD, {1: GOOD, 2: GOOD}, Outcome.MATCHED, ()),
        (GOOD, {1: GOOD, 2: BAD}, Outcome.MATCHED, (2,)),
        (BAD, {1: GOOD, 2: GOOD}, Outcome.DIFFERENT, ()),
        (None, {1: GOOD, 2: GOOD}, Outcome.DIFFERENT, ()),
        (BAD, {1: GOOD, 2: WORSE}, Outcome.DISPUTED, ()),
        (GOOD, {1: None, 2: None}, Outcome.DISPUTED, ()),
        (GOOD, {1: GOOD}, Outcome.MATCHED, ()),
        (BAD, {1: GOOD}, Outcome.DISPUTED, ()),
    ],
)
def test_what_follows_from_three_sketches(said: Any, seen: Any, outcome: Outcome, liars: tuple[int, ...]) -> None:
    finding = judge(said, seen, TOLERANCE)
    assert (finding.outcome, finding.liars) == (outcome, liars)


def test_sketches_differ_by_parts_of_the_norm() -> None:
    assert difference(GOOD, {"0/w": (1.0, 2.002)}) == pytest.approx(0.002 / 2.002)
    assert difference(GOOD, BAD) == pytest.approx(0.25)
    assert difference({"0/w": (0.0, 0.0)}, {"0/w": (0.0, 0.0)}) == 0.0
    assert difference({}, {}) == 0.0
    for other in ({}, {"0/v": (1.0, 2.0)}, None, {"0/w": (math.nan, 2.0)}, {"0/w": (math.inf, math.inf)}):
        assert difference(GOOD, other) == math.inf


def test_what_is_nothing_but_rounding_accuses_nobody() -> None:
    """The gradient of an attention's key bias is 0; machines of different kinds compute other remains of it."""
    here = {"0/key.bias": (3e-9, 2e-9), "0/key.weight": (0.4, 1.0)}
    there = {"0/key.bias": (-1e-9, 4e-9), "0/key.weight": (0.4, 1.0)}
    assert judge(here, {1: there, 2: there}, TOLERANCES["fp32"]).outcome is Outcome.MATCHED
    scaled = {key: (1.01 * product, 1.01 * norm) for key, (product, norm) in here.items()}
    assert judge(scaled, {1: there, 2: there}, TOLERANCES["fp32"]).outcome is Outcome.DIFFERENT


def test_where_machines_draw_other_numbers_nobody_is_called_a_cheat() -> None:
    cheat = judge(BAD, {1: GOOD, 2: GOOD}, TOLERANCES["fp32"])
    assert (cheat.outcome, doubted(cheat).outcome) == (Outcome.DIFFERENT, Outcome.DISPUTED)
    assert doubted(judge(GOOD, {1: GOOD, 2: BAD}, TOLERANCES["fp32"])).liars == ()


@pytest.mark.parametrize("words", [None, [], {"a": 1}, {"a": [1]}, {"a": [1, None]}, {"a": [1, "2"]}, {"a": [True, 1]}])
def test_what_is_no_sketch_equals_none(words: Any) -> None:
    assert read_sketch(words) is None


def test_a_sketch_is_read_as_it_was_said() -> None:
    assert read_sketch({"0/w": [1, 2.5]}) == {"0/w": (1.0, 2.5)}


@given(st.integers(1, 3 * PERIOD), st.integers(0, 5))
def test_a_sketch_is_linear_and_sees_every_element(size: int, seed: int) -> None:
    sketcher, generator = Sketcher(seed), torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, size, generator=generator)
    sizes = float(one.norm() + other.norm())
    product, norm = sketcher.of(one).tolist()
    summed, beside = sketcher.of(one + other).tolist(), sketcher.of(other).tolist()
    assert summed[0] == pytest.approx(product + beside[0], abs=1e-4 * sizes)
    assert norm == pytest.approx(float(one.norm()), rel=1e-4)
    place = seed * 7919 % size
    unit = torch.zeros(size)
    unit[place] = 1.0
    assert abs(sketcher.of(unit)[0]) == 1.0
    assert Sketcher(seed).of(one).tolist() == [product, norm]


def test_a_weight_gradient_cannot_be_sketched_by_its_factors() -> None:
    """The sums of the two factors, which are cheap to have, say nothing of the product with the signs."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.rand(300, generator=generator), torch.rand(400, generator=generator)
    product, norm = Sketcher(1).of(torch.outer(rows, columns)).tolist()
    assert abs(product) < 5 * norm
    assert float(rows.sum() * columns.sum()) > 100 * norm


def test_the_rate_is_small_by_default_and_only_where_it_tells_something() -> None:
    def rate(parallel: ParallelConfig, **options: Any) -> float:
        return Trainer(DistributedModel(Net()), parallel=parallel, progress=False, **options).options.spot_checks

    assert rate(ParallelConfig(data_parallel=3)) == DEFAULT_RATE == 0.01
    assert rate(ParallelConfig(data_parallel=2)) == 0.0
    assert rate(ParallelConfig(data_parallel=2), spot_checks=0.5) == 0.5
    assert rate(ParallelConfig(data_parallel=4), sync="zero3") == 0.0
    assert rate(ParallelConfig(data_parallel=4), spot_checks=0) == 0.0
    with pytest.raises(UnsupportedOptionError, match=r"spot_checks=0.1: only where data_parallel is 2 or more"):
        rate(ParallelConfig(data_parallel=4), sync="zero3", spot_checks=0.1)
    with pytest.raises(UnsupportedOptionError, match="spot_checks"):
        rate(ParallelConfig(), spot_checks=0.1)
    for value in (-0.1, 1.1, True, "0.1", math.nan):
        with pytest.raises(ConfigError, match=r"expected a share of the units, from 0 \(none\) to 1"):
            rate(ParallelConfig(data_parallel=2), spot_checks=value)


def test_a_script_of_faults_carries_a_cheat() -> None:
    script = FaultScript.of(environment_of(fail_at(0, 1, "forward"), cheat(2, SCALED, factor=3)))
    assert script.cheat == Cheat(rank=2, step=2, how=SCALED, factor=3.0)
    assert FaultScript().cheat is None
    for wrong in ({"how": "lazy"}, {"how": SCALED, "factor": math.nan}, {"how": SCALED, "factor": True}):
        with pytest.raises(ConfigError):
            cheat(0, **wrong)  # type: ignore[arg-type]  # what a variable of the environment may hold
