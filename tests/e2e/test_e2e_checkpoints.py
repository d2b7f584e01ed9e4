"""CKP-02 over real processes: a trainer is killed in the middle of a save, another one goes on under another layout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import checkpoint_child as child
import e2e_models as models
import pytest
import torch

from distensor.core import JobId, ParallelConfig
from distensor.core.control import JobState
from distensor.training import Session
from distensor.training.checkpoint_folder import CheckpointFolder
from distensor.training.checkpoint_shards import check_files
from distensor.training.sessions import TOKEN_VARIABLE


def killed_while_saving(mesh: Session, folder: Path) -> list[float]:
    """The losses of the steps that the killed trainer had done."""
    assert mesh.cluster is not None
    process = subprocess.Popen(
        [sys.executable, child.__file__, str(folder)],
        env={**os.environ, TOKEN_VARIABLE: mesh.cluster.trainer_token, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    said: dict[str, list[str]] = {"job": [], "loss": [], "saving": []}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            word, _, value = line.strip().partition(" ")
            said[word].append(value)
            if said["saving"] and len(said["loss"]) >= 5:
                break
    finally:
        process.kill()
        process.communicate(timeout=30)
    # The hub would wait two minutes for the trainer to come back, and keep its workers for so long.
    mesh.client.end_job(JobId(said["job"][0]), JobState.FAILED, "killed")
    return [float(loss) for loss in said["loss"]]


def test_ckp_02_a_trainer_killed_while_it_saves_leaves_a_loadable_checkpoint(mesh: Session, tmp_path: Path) -> None:
    _, losses, _ = models.train_here(child.build(), child.BATCHES, lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6))
    done = killed_while_saving(mesh, tmp_path)
    assert done == pytest.approx(losses[: len(done)], rel=1e-5)
    assert len(done) >= 5, "training went on while the save of step 4 waited for its disk"
    latest = CheckpointFolder(tmp_path).find()
    assert latest is not None
    assert latest.manifest.step == 2, "keep=1, and it is still there"
    check_files(latest.path, latest.manifest)
    assert len(list(tmp_path.glob("step-*"))) == 2, "the other one has no manifest"
    with child.trainer_for(mesh, ParallelConfig(), str(tmp_path)) as trainer:
        history = trainer.fit(child.BATCHES, resume=True)
    assert [step.step for step in history.steps] == list(range(3, 9))
    assert history.losses == pytest.approx(losses[2:], rel=1e-5)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000008"], "and what was left over is gone"
