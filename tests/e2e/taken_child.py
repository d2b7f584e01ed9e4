"""A trainer that a test kills and starts again: `python taken_child.py STEPS [JOB [FOLDER]]`, the token in the
environment. It says on standard output which job it has and each loss, and at the end a hash of the weights."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

import e2e_models as models
import torch
from torch.utils.data import DataLoader, Dataset

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import StepResult, Trainer, members
from distensor.training.sessions import open_session

POINTS = models.points(64, rows=1, seed=5)
ROWS = 8


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


def main(steps: int, job: str = "", folder: str = "", dp: int = 2, pp: int = 1) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    members.FIRST_TRY_SECONDS = 0.2
    module = build()
    checkpoints = {"checkpoint": folder, "checkpoint_every": 5} if folder else {}
    opened = open_session("hub")
    with Trainer(
        DistributedModel(module, stage_mapping=StageMapping(models.MLP_TWO) if pp == 2 else None),
        parallel=ParallelConfig(data_parallel=dp, pipeline_parallel=pp), lr=1e-2, lr_schedule="cosine", ema=0.9,
        loss=models.classify, session=opened, progress=False, **checkpoints,
    ) as trainer:  # fmt: skip

        def tell(result: StepResult) -> None:
            assert trainer.job is not None
            if result.step == 1 or job:
                print("job", trainer.job.topology.job_id, flush=True)
            print("step", result.step, result.loss, flush=True)

        history = trainer.fit(loader(), epochs=10_000, max_steps=steps, on_step=tell, resume=job or bool(folder))
        for earlier in history.earlier:
            print("earlier", earlier.step, earlier.loss, flush=True)
        assert trainer.job is not None
        print("replicas", *trainer.job.digests(), flush=True)
        print("average", digest(trainer.ema_state_dict()), flush=True)
        print("weights", digest(module.state_dict()), flush=True)
    opened.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
