"""The simulator finds what it is there to find: each planted bug within some seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted_bugs import BUGS, FINDING, PlantedBug

from distensor.testing.simulation import Promise, run

MOST_SEEDS = 25


def seeds_to_find(bug: PlantedBug, most: int = MOST_SEEDS) -> tuple[int, str]:
    """How many seeds it takes until the bug shows, and what it then looks like."""
    for seed in range(most):
        violation = run(replace(FINDING, seed=seed)).violation
        if violation is not None:
            assert violation.promise in bug.breaks, f"{bug.name}: {violation}"
            return seed + 1, str(violation)
    pytest.fail(f"{bug.name} is not found in {most} seeds")


def marked(bug: PlantedBug) -> object:
    return pytest.param(bug, id=bug.name, marks=[pytest.mark.slow, pytest.mark.timeout(600)] if bug.rare else [])


def test_there_are_bugs_of_many_kinds() -> None:
    assert len(BUGS) >= 16
    assert {promise for bug in BUGS for promise in bug.breaks} >= set(Promise) - {Promise.DEFECT}


@pytest.mark.parametrize("bug", [marked(bug) for bug in BUGS])
def test_a_planted_bug_is_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    seeds, found = seeds_to_find(bug)
    print(f"{bug.name}: {seeds} seeds: {found}")
