"""Learning-rate schedules against torch's own, and as functions of the optimizer step alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from distensor.core.errors import ConfigError
from distensor.optim import LrSchedule, parse_lr_schedule
from distensor.optim.schedules import Curve

PEAK = 0.5


def torch_rates(make: Any, steps: int) -> list[float]:
    """The rates of `steps` optimizer steps under a scheduler of torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates_of(schedule: LrSchedule, steps: int) -> list[float]:
    return [schedule.rate(step, PEAK) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("curve", "after"),
    [
        ("constant", lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        ("linear", lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=16)),
        ("cosine", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.05)),
    ],
)
def test_the_rates_are_torchs(curve: Any, after: Any) -> None:
    def make(optimizer: Any) -> Any:
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=1 / 5, total_iters=4)
        return lr_scheduler.SequentialLR(optimizer, [warmup, after(optimizer)], milestones=[4])

    schedule = LrSchedule(curve=curve, warmup_steps=4, total_steps=20, min_lr=0.05)
    assert rates_of(schedule, 20) == pytest.approx(torch_rates(make, 20), rel=1e-12)


def test_warmup_stable_decay() -> None:
    schedule = LrSchedule(curve=Curve.WSD, warmup_steps=3, total_steps=10, decay_steps=2, min_lr=0.1)
    assert rates_of(schedule, 12) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.1, 0.1])
    tenth = LrSchedule(curve=Curve.WSD, total_steps=20)
    assert rates_of(tenth, 20) == [PEAK] * 19 + [PEAK / 2], "a tenth of the steps decays by default"


def test_ten_steps_of_linear_decay() -> None:
    assert rates_of(LrSchedule(curve=Curve.LINEAR, total_steps=10), 11) == pytest.approx(
        [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0]
    )


schedules = st.builds(
    lambda curve, warmup, rest, low: LrSchedule(
        curve=curve, warmup_steps=warmup, total_steps=warmup + rest, min_lr=low
    ),
    st.sampled_from(list(Curve)),
    st.integers(0, 30),
    st.integers(1, 60),
    st.floats(0, PEAK),
)


@given(schedules)
@settings(max_examples=60, deadline=None)
def test_rates_rise_to_the_peak_once_and_never_leave_their_bounds(schedule: LrSchedule) -> None:
    assert schedule.total_steps is not None
    rates = rates_of(schedule, schedule.total_steps + 3)
    assert max(rates) == rates[schedule.warmup_steps] == PEAK
    warm, rest = rates[: schedule.warmup_steps + 1], rates[schedule.warmup_steps :]
    assert all(earlier < later for earlier, later in itertools.pairwise(warm))
    assert all(earlier >= later for earlier, later in itertools.pairwise(rest))
    assert all(schedule.min_lr <= rate for rate in rest)
    assert LrSchedule.from_json(schedule.to_json()) == schedule


def test_the_number_of_steps_is_filled_in_once() -> None:
    open_ended = parse_lr_schedule("cosine")
    assert isinstance(open_ended, LrSchedule)
    assert open_ended.needs_total
    with pytest.raises(ConfigError, match=r"cosine.*total_steps"):
        open_ended.rate(1, PEAK)
    filled = open_ended.with_total(10)
    assert filled.total_steps == 10
    assert filled.with_total(20) is filled
    assert not LrSchedule(curve=Curve.CONSTANT).needs_total


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"curve": "cosin"}, "cosin.*'cosine'"),
        ({"curve": "linear", "warmup_steps": -1}, "warmup_steps=-1"),
        ({"curve": "linear", "warmup_steps": 1.5}, "warmup_steps=1.5"),
        ({"curve": "linear", "total_steps": 0}, "total_steps=0"),
        ({"curve": "linear", "total_steps": True}, "total_steps=True"),
        ({"curve": "linear", "min_lr": -1.0}, "-1.0"),
        ({"curve": "linear", "decay_steps": 3}, "decay_steps=3.*'wsd'"),
        ({"curve": "wsd", "warmup_steps": 6, "decay_steps": 5, "total_steps": 10}, "6.*5.*more than.*10"),
        ({"curve": "linear", "warm": 3}, "warm"),
        ({}, "curve"),
    ],
)
def test_words_of_no_schedule_are_refused(words: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LrSchedule.from_json(words)


def test_a_floor_above_the_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_lr=0.9.*lr=0.5"):
        LrSchedule(curve=Curve.LINEAR, total_steps=5, min_lr=0.9).rate(1, PEAK)


@pytest.mark.parametrize("value", ["polynomial", 3, 0.1, [0.1]])
def test_what_is_no_schedule_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="lr_schedule="):
        parse_lr_schedule(value)


def test_functions_and_schedules_are_taken_as_they_are() -> None:
    schedule = LrSchedule(curve=Curve.CONSTANT)
    assert parse_lr_schedule(schedule) is schedule
    assert parse_lr_schedule(float) is float
    assert parse_lr_schedule(None) is None
