"""Replicas that exchange over aggregators: real processes, a service that is killed, the numbers of direct exchange."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import e2e_models as models
import pytest
import torch

from distensor.core import ParallelConfig
from distensor.core.errors import PlacementError
from distensor.nn import DistributedModel
from distensor.training import Session, Trainer

REPLICAS = 3
SPARSE = {"k": 64, "chunk": 256}
BATCHES = models.points(6, rows=12)


@contextmanager
def aggregator(mesh: Session, folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """The service, connected."""
    assert mesh.cluster is not None
    words = [sys.executable, "-m", "distensor"]
    token = subprocess.run(
        [*words, "hub", "token", "--state", str(mesh.cluster.folder / "hub")],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.split()[-1]  # fmt: skip
    process = subprocess.Popen(
        [*words, "aggregator", "--state", str(folder), "--name", name, "--json", "--exit-with-stdin"],
        env={**os.environ, "DISTENSOR_API_KEY": token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "connected"
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def run(mesh: Session, options: dict[str, Any], *, steps: int, before: dict[int, Any] | None = None) -> Any:
    """Losses, traffic of each step, and the weights at the end; `before` is called before some steps."""
    torch.manual_seed(1)
    parallel = ParallelConfig(data_parallel=REPLICAS)
    with Trainer(
        DistributedModel(models.MLP()), parallel=parallel, loss=models.classify, lr=0.01, progress=False, session=mesh,
        sync="distro", sync_options={**SPARSE, **options},
    ) as trainer:  # fmt: skip
        results = []
        for number in range(steps):
            (before or {}).get(number, lambda: None)()
            results.append(trainer.step(BATCHES[number]))
        weights = trainer.state_dict()
    return [result.loss for result in results], [result.replicas for result in results], weights


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_aggregators_change_no_number_and_may_be_killed(mesh: Session, tmp_path: Path) -> None:
    direct = run(mesh, {}, steps=6)
    with aggregator(mesh, tmp_path, "casa") as service:
        lived = run(mesh, {"topology": "aggregator"}, steps=6)
        assert_same(lived, direct)
        # One copy up instead of two; what comes down is the same.
        up, direct_up = (min(each.up for each in found[1]) for found in (lived, direct))
        assert up < 0.85 * direct_up  # of a model so small that the sums of a step weigh as much
        killed = run(mesh, {"topology": "aggregator"}, steps=6, before={3: service.kill})
        assert_same(killed, direct)
        assert min(each.up for each in killed[1][4:]) > 0.9 * direct_up  # direct again
    with pytest.raises(PlacementError, match="needs an aggregator on any node, and there is no room"):
        run(mesh, {"topology": "aggregator"}, steps=1)


def test_one_in_each_site_in_a_worker_of_the_site(mesh: Session) -> None:
    direct = run(mesh, {}, steps=4)
    sites = {"atlas": ["atlas"], "bolt": ["bolt"]}
    assert_same(run(mesh, {"topology": "hybrid", "sites": sites}, steps=4), direct)
    mesh_now = mesh.query_mesh()
    assert "aggregator" not in {device.kind for device in mesh_now.devices}
