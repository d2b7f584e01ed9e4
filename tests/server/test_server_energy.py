"""The integral of power over own work, and what it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor_server.income.energy import EnergyMeter, Tariff, Used, cost_micro, net_micro, worth_micro


def run(samples: list[tuple[float, dict[str, float | None]]]) -> dict[str, Used]:
    """All that was used, by device."""
    meter = EnergyMeter()
    total: dict[str, Used] = {}
    for at, watts in samples:
        for device, used in meter.sample(at, watts).items():
            old = total.get(device, Used(work_ms=0, measured_ms=0, millijoules=0))
            total[device] = Used(
                work_ms=old.work_ms + used.work_ms,
                measured_ms=old.measured_ms + used.measured_ms,
                millijoules=old.millijoules + used.millijoules,
            )
    return total


def test_a_constant_power_is_power_times_time() -> None:
    used = run([(2.0 * i, {"gpu": 300.0}) for i in range(31)])
    assert used == {"gpu": Used(work_ms=60_000, measured_ms=60_000, millijoules=18_000_000)}


def test_a_ramp_is_its_mean() -> None:
    assert run([(0.0, {"gpu": 100.0}), (2.0, {"gpu": 300.0})])["gpu"].millijoules == 400_000


def test_idle_time_and_the_time_of_others_is_not_ours() -> None:
    """The device works for us from 4 to 8 s: what it drew before and after is not charged."""
    used = run(
        [
            (0.0, {}),
            (2.0, {}),
            (4.0, {"gpu": 300.0}),
            (6.0, {"gpu": 300.0}),
            (8.0, {"gpu": 300.0}),
            (10.0, {}),
            (12.0, {}),
        ]
    )
    assert used["gpu"] == Used(work_ms=4000, measured_ms=4000, millijoules=1_200_000)


@pytest.mark.parametrize(
    ("samples", "measured_ms", "millijoules", "why"),
    [
        ([(0.0, 100.0), (2.0, None), (4.0, 100.0)], 0, 0, "one reading is missing: both halves are unknown"),
        ([(0.0, 100.0), (2.0, 100.0), (4.0, None)], 2000, 200_000, "the half that is known counts"),
        ([(0.0, 100.0), (10.0, 100.0)], 10_000, 1_000_000, "the longest gap that counts"),
        ([(0.0, 100.0), (10.5, 100.0)], 0, 0, "a gap in which nobody looked"),
    ],
)
def test_what_is_not_measured_is_not_estimated(
    samples: list[tuple[float, float | None]], measured_ms: int, millijoules: int, why: str
) -> None:
    used = run([(at, {"gpu": watts}) for at, watts in samples])["gpu"]
    assert (used.measured_ms, used.millijoules) == (measured_ms, millijoules), why
    assert used.work_ms == round(1000 * (samples[-1][0] - samples[0][0]))


def test_a_clock_that_stands_or_goes_back_adds_nothing() -> None:
    used = run([(5.0, {"gpu": 100.0}), (5.0, {"gpu": 100.0}), (3.0, {"gpu": 100.0}), (4.0, {"gpu": 100.0})])
    assert used["gpu"].millijoules == 100_000


def test_a_sleep_is_no_work() -> None:
    meter = EnergyMeter()
    meter.sample(0.0, {"gpu": 100.0})
    meter.interrupt()
    assert meter.sample(3600.0, {"gpu": 100.0}) == {}
    assert meter.sample(3602.0, {"gpu": 100.0})["gpu"].millijoules == 200_000


@given(
    parts=st.lists(st.floats(min_value=0.0001, max_value=5.0), min_size=1, max_size=40),
    watts=st.floats(min_value=0, max_value=1000),
)
def test_many_short_samples_lose_nothing_by_rounding(parts: list[float], watts: float) -> None:
    at, samples = 0.0, [(0.0, {"gpu": watts})]
    for part in parts:
        at += part
        samples.append((at, {"gpu": watts}))
    used = run([(at, dict(known)) for at, known in samples])["gpu"]
    assert abs(used.millijoules - 1000 * watts * at) <= 1.001
    assert abs(used.work_ms - 1000 * at) <= 1.001
    assert used.work_ms == used.measured_ms


def test_cost_is_rounded_up_and_worth_down() -> None:
    tariff = Tariff(price_micro=320_000, currency="EUR", credits_micro=3_000_000)
    assert cost_micro(3_600_000_000, tariff) == 320_000  # 1 kWh at 0.32
    assert (cost_micro(0, tariff), cost_micro(1, tariff)) == (0, 1)
    assert (worth_micro(1_000_000, tariff), worth_micro(10, tariff)) == (333_333, 3)
    assert net_micro(3_000_000, 3_600_000_000, tariff) == 680_000
    assert net_micro(0, 3_600_000_000, tariff) == -320_000


def test_without_price_or_rate_there_is_no_net() -> None:
    assert worth_micro(5, Tariff(price_micro=1)) is None
    assert net_micro(5, 5, Tariff(price_micro=1)) is None
    assert net_micro(5, 5, Tariff(price_micro=0, credits_micro=1)) is None
