"""How much the simulator sees in how much time, and how many seeds it needs for each planted bug.

python benchmarks/simulator.py --seeds 100
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from distensor.core.table import table
from distensor.testing.simulation import Outcome, Settings, run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/testing"))
from planted_bugs import BUGS, FINDING, PlantedBug

MOST_SEEDS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="of each store")
    options = parser.parse_args()
    memory = [run(Settings(seed=seed)) for seed in range(options.seeds)]
    sqlite = [run(Settings(seed=seed, sqlite=True)) for seed in range(options.seeds)]
    print(table(("books", "seeds", "broken", "events", "faults", "simulated", "real", "times"), _rows(memory, sqlite)))
    print()
    print(_events([*memory, *sqlite]))
    print()
    print(table(("planted bug", "seeds", "what was found"), [_found(bug) for bug in BUGS]))
    return 1 if any(outcome.violation for outcome in (*memory, *sqlite)) else 0


def _rows(memory: list[Outcome], sqlite: list[Outcome]) -> list[tuple[object, ...]]:
    return [_row("in memory", memory), _row("SQLite, torn", sqlite)]


def _row(name: str, outcomes: list[Outcome]) -> tuple[object, ...]:
    simulated, real = sum(one.seconds for one in outcomes), sum(one.real for one in outcomes)
    return (
        name,
        len(outcomes),
        sum(one.violation is not None for one in outcomes),
        f"{sum(one.steps for one in outcomes):,}",
        f"{sum(len(one.faults) for one in outcomes):,}",
        f"{simulated / 3600:.2f} h",
        f"{real:.1f} s",
        f"{simulated / real:.0f}",
    )


def _events(outcomes: Iterable[Outcome]) -> str:
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
        if outcome.violation is not None:
            print(f"BROKEN: {outcome.violation}\n  {outcome.command}")
    return ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))


def _found(bug: PlantedBug) -> tuple[object, ...]:
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for seed in range(MOST_SEEDS):
            violation = run(replace(FINDING, seed=seed)).violation
            if violation is not None:
                right = "" if violation.promise in bug.breaks else " (not what was planted)"
                return bug.name.replace("_", " "), seed + 1, f"{violation.promise.name}{right}"
    return bug.name.replace("_", " "), f"more than {MOST_SEEDS}", "nothing"


if __name__ == "__main__":
    sys.exit(main())
