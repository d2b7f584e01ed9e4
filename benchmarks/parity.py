"""Loss and gradients of every model family on a real mesh, against the eager module in one process.

Prints one Markdown table: the relative difference of the loss, of the whole gradient, and the largest of any
parameter's gradient alone, for each family cut into 1, 2 and 4 pipeline stages (one rank each), with 1 and 2
replicas, the rows of each replica in two micro-batches. `python benchmarks/parity.py llama gpt2` runs some.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "program"))

from program_families import FAMILIES, Family

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Parity, Session, Trainer
from distensor.training.sessions import session

STAGES = (1, 2, 4)
REPLICAS = (1, 2)
ROWS, SEQUENCE = 5, 12


def measure(mesh: Session, family: Family, stages: int, replicas: int) -> Parity:
    """One batch of uneven parts through `stages` x `replicas` ranks."""
    mapping = StageMapping(family.stages(stages)) if stages > 1 else None
    trainer = Trainer(
        DistributedModel(family.build(), stage_mapping=mapping),
        parallel=ParallelConfig(data_parallel=replicas, pipeline_parallel=stages),
        loss=family.loss,
        micro_batches=2,
        name=f"parity-{family.name}".replace("_", "-"),
        progress=False,
        session=mesh,
    )
    with trainer:
        return trainer.check_parity(family.batch(ROWS, SEQUENCE))


def main() -> int:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(FAMILIES)
    combinations = list(itertools.product(STAGES, REPLICAS))
    print("| family | " + " | ".join(f"pp {stages}, dp {replicas}" for stages, replicas in combinations) + " |")
    print("|---|" + "---|" * len(combinations))
    worst = 0.0
    with session("local", workers=max(STAGES) * max(REPLICAS), nodes=2) as mesh:
        for name in names:
            cells = []
            for stages, replicas in combinations:
                parity = measure(mesh, FAMILIES[name], stages, replicas)
                worst = max(worst, parity.loss_difference, parity.gradient_difference)
                figures = (parity.loss_difference, parity.gradient_difference, parity.worst_gradient[1])
                cells.append(" / ".join("0" if figure == 0 else f"{figure:.1e}" for figure in figures))
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nEach cell: loss / whole gradient / worst parameter. Largest of the first two: {worst:.1e} (limit 1e-06).")
    return 0 if worst <= 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
