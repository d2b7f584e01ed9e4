"""What a newcomer runs: the demo and the quick start, as processes of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Python = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_ends_with_one_object_that_says_it_all(python: Python) -> None:
    done = python("-m", "distensor", "demo", "--json", "--steps", "4", timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["loss_last"] < report["loss_first"]
    assert report["max_relative_difference"] <= 1e-5
    assert report["tokens_per_second"] > 0
    assert report["restarts"] == 0
    assert report["credits"].keys() == {"atlas", "bolt"}
    units = 4 * 4 * 4  # steps, ranks, micro-batches of a replica
    assert sum(report["credits"].values()) == units * 0.001
    links = report["bytes_per_link"]
    replica = links["rank 0 -> rank 2"]  # gradients of one stage between two replicas: half of 2 MB twice a step
    assert 4 * 2.0e6 < replica < 4 * 2.3e6
    assert links["rank 0 -> rank 1"] > 0
    assert links["trainer -> rank 0"] > 0


@pytest.mark.slow
def test_the_demo_with_chaos_goes_on_and_says_so(python: Python) -> None:
    done = python("-m", "distensor", "demo", "--json", "--chaos", "--steps", "60", timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    first, *_ = report["members"]
    assert (first["step"], first["epoch"], first["replicas"]) == (20, 2, 1)
    assert report["max_relative_difference"] <= 1e-5
    assert "SIGKILL" in done.stderr


def test_the_demo_refuses_wrong_words_by_name(python: Python) -> None:
    done = python("-m", "distensor", "demo", "--steps", "1", cwd=ROOT)
    assert done.returncode == 64
    assert "--steps 1" in done.stderr


def test_the_quick_start_runs_and_is_the_one_in_the_readme(python: Python) -> None:
    done = python("examples/quickstart.py", timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    difference = re.search(r"largest difference to one process: (\S+)", done.stdout)
    assert difference is not None
    assert float(difference[1]) <= 1e-6
    losses = re.search(r"loss (\S+) -> (\S+) in 80 steps", done.stdout)
    assert losses is not None
    assert float(losses[2]) < float(losses[1]) / 2
    assert int(re.search(r"accuracy (\d+)%", done.stdout)[1]) > 80  # type: ignore[index]
    assert_shown(0, "quickstart.py")


def assert_shown(number: int, example: str) -> None:
    """Every line of the README's Python block `number` is in the example, which a test runs."""
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[number]
    code = (ROOT / "examples" / example).read_text()
    for line in shown.splitlines():
        assert line.strip() in code, f"README shows a line that {example} does not have: {line!r}"


@pytest.mark.timeout(240)
def test_the_example_with_cut_weights_runs_and_is_the_one_in_the_readme(python: Python) -> None:
    done = python("examples/four_axes.py", timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    difference = re.search(r"largest difference to one process: (\S+)", done.stdout)
    assert difference is not None
    assert float(difference[1]) <= 2e-6
    losses = re.search(r"loss (\S+) -> (\S+) in 30 steps", done.stdout)
    assert losses is not None
    assert float(losses[2]) < float(losses[1]) * 0.7
    assert_shown(1, "four_axes.py")
