"""The trainer of the tests over emulated home connections: `home_child.py '<JSON of ParallelConfig>'`."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer
from distensor.training.sessions import session

STEPS = 6


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parallel = ParallelConfig(**json.loads(sys.argv[1]))
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    stages = StageMapping([["0"], ["2"]]) if parallel.pipeline_parallel > 1 else None
    batch = (torch.randn(16, 64), torch.randint(10, (16,)))
    with (
        session("hub") as opened,
        Trainer(
            DistributedModel(module, stage_mapping=stages),
            parallel=parallel,
            loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
            progress=False,
            session=opened,
        ) as trainer,
    ):
        parity = trainer.check_parity(batch).max_relative_difference
        losses = [trainer.step(batch).loss for _ in range(STEPS)]
        print(json.dumps({"losses": losses, "parity": parity, "mesh": str(opened.query_mesh())}))


if __name__ == "__main__":
    main()
