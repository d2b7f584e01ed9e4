"""The tables of `benchmarks/distro_report.py`, from results whose numbers are known."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("distro_report", ROOT / "benchmarks/distro_report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(loss: float, sent: float) -> dict[str, float]:
    return {"loss": loss, "bytes_sent_a_step": sent}


RUNS = {
    "0.1M/500/few/0.001/0": run(2.2, 10.0),
    "0.1M/500/few/0.002/0": run(2.1, 10.0),
    "0.1M/500/few/0.002/1": run(2.3, 10.0),
    "0.1M/500/adamw/0.004/0": run(2.0, 1000.0),
    "0.8M/500/few/0.001/0": run(1.5, 20.0),
}


def test_the_best_rate_of_the_first_seed_counts_with_all_its_seeds(report: ModuleType) -> None:
    rows = report.rows_of(RUNS)["0.1M", 500]

    assert [row.method for row in rows] == ["adamw", "few"]
    assert rows[1].rate == 0.002
    assert rows[1].rates == (0.001, 0.002)
    assert rows[1].losses == (2.1, 2.3)
    assert rows[1].loss == pytest.approx(2.2)


def test_a_gap_and_a_ratio_are_taken_against_the_baseline_of_the_same_size(report: ModuleType) -> None:
    line = report.table(report.rows_of(RUNS)["0.1M", 500]).splitlines()[3]

    assert line == "| few | 0.002 (0.001, 0.002) | 2 | 2.200 (2.100, 2.300) | +10.0 % | 10 | 100x |"
    assert "%" not in report.table(report.rows_of(RUNS)["0.8M", 500])


def test_the_page_says_what_the_results_say(report: ModuleType) -> None:
    page = (ROOT / "docs/distro.md").read_text()

    for rows in report.rows_of(json.loads((ROOT / "docs/distro.json").read_text())).values():
        for row in rows:
            assert f"{row.sent:,.0f}" in page, row.method
            assert f"{row.loss:.3f}" in page, row.method
