"""What a newcomer runs: the demo and the quick start, as processes of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    code = (ROOT / "examples" / "quickstart.py").read_text()
    for line in shown[1].splitlines():
        assert line.strip() in code, f"README's quick start has a line that the example does not: {line!r}"
