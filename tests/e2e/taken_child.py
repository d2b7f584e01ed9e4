"""A trainer that a test kills and starts again: `python taken_child.py STEPS [JOB [FOLDER [STOP]]]`.

The token is in the environment. It ends after STEPS, or when the file STOP is there. It says on standard output which
job it has and each loss, and at the end a hash of the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import e2e_models as models
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import StepResult, Trainer, members
from distensor.training.sessions import open_session

POINTS = models.points(64, rows=1, seed=5)
ROWS = 8
LR = 1e-2


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return len(POINTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, classes = POINTS[index]
        return inputs[0], classes[0]


def build() -> models.MLP:
    torch.manual_seed(7)
    return models.MLP()


def loader() -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """Shuffled: the order comes from the generator of this process."""
    return DataLoader(Points(), batch_size=ROWS, shuffle=True)


def digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        "".join(f"{k}{v.numpy().tobytes().hex()}" for k, v in sorted(state.items())).encode()
    ).hexdigest()


class StoppedError(Exception):
    """The file that ends the run is there."""


def main(steps: int, job: str = "", folder: str = "", stop: str = "") -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    members.FIRST_TRY_SECONDS = 0.2
    module = build()
    checkpoints = {"checkpoint": folder, "checkpoint_every": 5} if folder else {}
    opened = open_session("hub")
    with Trainer(
        DistributedModel(module), parallel=ParallelConfig(data_parallel=2), lr=LR, lr_schedule="cosine", ema=0.9,
        loss=models.classify, session=opened, progress=False, **checkpoints,
    ) as trainer:  # fmt: skip

        def tell(result: StepResult) -> None:
            assert trainer.job is not None
            print("job", trainer.job.topology.job_id, trainer.job.topology.epoch, flush=True)
            print("step", result.step, result.loss, flush=True)
            if stop and Path(stop).exists():
                raise StoppedError

        if job:
            print("resumed", trainer.resume(job), "checkpoint" if trainer._taken is None else "taken", flush=True)
            for earlier in trainer.earlier:
                print("earlier", earlier.step, earlier.loss, flush=True)
        with contextlib.suppress(StoppedError):
            trainer.fit(loader(), epochs=1_000_000, max_steps=steps, on_step=tell, resume=bool(job or folder))
        assert trainer.job is not None
        trainer.pull()
        print("replicas", *trainer.job.digests(), flush=True)
        print("average", digest(trainer.ema_state_dict()), flush=True)
        if stop:
            save_file(module.state_dict(), f"{stop}.weights")
        print("weights", digest(module.state_dict()), flush=True)
    opened.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
