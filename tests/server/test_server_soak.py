"""Nothing of the supervisor grows while workers are restarted all the time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import soak

SECONDS = float(os.environ.get("DISTENSOR_SOAK_SECONDS", "3600"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_grows_while_workers_are_restarted(short_dir: Path) -> None:
    samples = soak.soak(short_dir, SECONDS)
    print(soak.report(samples))
    grown = {growth.what: growth.grown for growth in soak.judge(samples)}
    assert samples[-1].jobs > SECONDS / 10, "the jobs went on to the end"
    assert grown["rss_mib"] <= 2.0
    assert grown["descriptors"] <= 1
    assert grown["threads"] <= 0
    assert max(sample.zombies for sample in samples) <= 2, "only one that ends in this very moment"
    assert max(sample.log_bytes for sample in samples) <= 6 * 50_000 + 100_000
    assert max(sample.log_files for sample in samples) <= 60


def test_growth_is_seen_and_noise_is_not() -> None:
    times = [float(second) for second in range(0, 3600, 10)]
    noise = [40.0 + (number * 7 % 5) / 10 for number in range(len(times))]
    flat = soak.growth("rss", times, noise)
    assert abs(flat.grown) < 0.2
    assert abs(flat.slope_per_hour) < 0.2
    leak = soak.growth("rss", times, [value + second / 600 for value, second in zip(noise, times, strict=True)])
    assert leak.grown == pytest.approx(4.5, abs=0.3)
    assert leak.slope_per_hour == pytest.approx(6.0, abs=0.5)
