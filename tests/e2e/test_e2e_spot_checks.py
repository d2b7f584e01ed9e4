"""A worker that contributes gradients which it did not compute: the credits of its node are held, and no others."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import e2e_models as models
import pytest
import torch

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.node.faults import STALE, cheat, environment_of
from distensor.training import Trainer
from distensor.training.sessions import open_session
from distensor.training.spot_checks import Outcome

STEPS, CHEATING = 40, 1


def test_the_work_of_a_cheating_node_is_held_at_the_hub(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in environment_of(cheat(CHEATING, STALE, step=2)).items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(1)
    opened = open_session("local", workers=3, nodes=3)
    try:
        with (
            caplog.at_level(logging.WARNING),
            Trainer(
                DistributedModel(models.MLP()),
                parallel=ParallelConfig(data_parallel=3),
                loss=models.classify,
                spot_checks=1 / 3,
                progress=False,
                session=opened,
            ) as trainer,
        ):
            trainer.fit(models.points(STEPS, rows=9))
            assert trainer.job is not None
            checks, topology = trainer.job.checks, trainer.job.topology
        assert checks.counts[Outcome.DIFFERENT] > 0
        assert {int(found.unit.rank) for found in checks.newest} == {CHEATING}
        assert "did not compute what rank" in caplog.text
        assert opened.cluster is not None
        command = [sys.executable, "-m", "distensor", "hub", "hold", "list", "--json"]
        state = ["--state", str(opened.cluster.folder / "hub")]
        printed = subprocess.run([*command, *state], capture_output=True, text=True, timeout=60, check=True).stdout
    finally:
        opened.close()
    (held,) = json.loads(printed)["held"]
    assert (held["job_id"], held["node_id"]) == (topology.job_id, topology.members[CHEATING].node_id)
    assert held["objections"] == checks.counts[Outcome.DIFFERENT]
    assert 0 < held["micro"] <= STEPS * 1000
    print(f"{checks.counts.total()} checks of {STEPS} steps, {held['objections']} different, {held['micro']} held")
