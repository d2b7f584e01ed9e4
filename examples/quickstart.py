"""The README's quick start: a small model on four real workers, in about ten seconds on a laptop.

With DISTENSOR_TOKEN set to the trainer token of a hub it runs on that hub's nodes instead, on one worker where there
are fewer than four.
"""

import os

import torch
from torch import nn

import distensor as ds
from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping


class Classifier(nn.Module):
    """Any module does: nothing in it knows about disTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points in space, to be sorted by which of three directions they lie nearest to."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(3, 8, generator=generator)
    points = [torch.randn(32, 8, generator=generator) for _ in range(count)]
    return [(inputs, (inputs @ directions.T).argmax(dim=1)) for inputs in points]


def main() -> None:
    torch.manual_seed(0)
    if os.environ.get("DISTENSOR_TOKEN"):
        ds.init(mode="hub")
    else:
        ds.init(mode="local", workers=4)  # a real hub, a real supervisor, up to four real worker processes
    free = ds.query_mesh().available_workers
    parallel = ParallelConfig(data_parallel=2, pipeline_parallel=2) if free >= 4 else ParallelConfig()
    print(f"free workers: {free}, used: {4 if free >= 4 else 1}")

    model = DistributedModel(
        Classifier(),
        stage_mapping=StageMapping([["embed", "layers.[0-1]"], ["layers.[2-3]", "head"]]),
    )
    trainer = ds.Trainer(
        model,
        parallel=parallel,
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
        lr=1e-2,
    )
    batches = make_batches(40)
    print(f"largest difference to one process: {trainer.check_parity(batches[0]).max_relative_difference:.1e}")
    history = trainer.fit(batches, epochs=2)
    print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f} in {len(history)} steps")

    inputs, targets = batches[0]
    correct = (model.module(inputs).argmax(dim=1) == targets).float().mean()  # the trained weights are back here
    print(f"accuracy {correct:.0%}")
    ds.shutdown()


if __name__ == "__main__":
    main()
