"""A trainer that a test kills while it saves: `python checkpoint_child.py FOLDER`, the token in the environment."""

from __future__ import annotations

import sys
import time
from typing import Any

import e2e_models as models
import torch

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import StepResult, Trainer, checkpoint_writing
from distensor.training.sessions import open_session

BATCHES = models.texts(8)


def build() -> torch.nn.Module:
    torch.manual_seed(11)
    return models.TiedLM()


def trainer_for(session: Any, parallel: ParallelConfig, folder: str, **options: Any) -> Trainer:
    return Trainer(
        DistributedModel(build()), parallel=parallel, lr=1e-2, optimizer_options={"eps": 1e-6}, checkpoint=folder,
        checkpoint_keep=1, session=session, progress=False, **options,
    )  # fmt: skip


def say(line: str) -> None:
    """In one write: `print` takes two, and two threads speak."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(folder: str) -> None:
    write = checkpoint_writing.write_tensors

    def slow(path: Any, tensors: Any) -> Any:
        if "step-00000002" not in str(path):  # the first is complete at once; from then on the disk is slow
            say("saving")
            time.sleep(60)
        return write(path, tensors)

    checkpoint_writing.write_tensors = slow
    torch.set_num_threads(1)
    with trainer_for(open_session("hub"), ParallelConfig(data_parallel=2), folder, checkpoint_every=2) as trainer:

        def tell(result: StepResult) -> None:
            if result.step == 1:
                assert trainer.job is not None
                say(f"job {trainer.job.topology.job_id}")
            say(f"loss {result.loss}")

        trainer.fit(BATCHES, on_step=tell)


if __name__ == "__main__":
    main(sys.argv[1])
