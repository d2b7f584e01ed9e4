"""Stage programs against the eager module: every family in 1, 2 and 4 stages, the batch whole and in two unequal parts.

Prints the largest relative difference of the loss and of any parameter's gradient (norm of the difference over the
norm of the eager gradient), over two sizes of the batch. `parts` 2 is data parallelism of two unequal shares.

    python benchmarks/program_parity.py [--families llama gpt2]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "program"))

from program_families import FAMILIES, STAGE_COUNTS, Family
from program_harness import eager, gradient_differences, loss_difference, run_cut, runners_of, whole_difference

from distensor.nn import DistributedModel, StageMapping
from distensor.program import capture, cut

BAR = 1e-6


def differences(family: Family, stages: int, parts: int) -> tuple[float, float, float]:
    """Largest of loss, of one parameter's gradient, and of the gradient as a whole."""
    module = family.build()
    captured = capture(module, family.batch(*family.sizes[0]), loss=family.loss)
    model = DistributedModel(module, stage_mapping=StageMapping(family.stages(stages)))
    pieces = cut(captured, model.stages)
    runners = runners_of(pieces)
    loss, single, whole = 0.0, 0.0, 0.0
    for rows, sequence in family.sizes:
        batch = family.batch(rows, sequence)
        reference, ours = eager(module, batch, family.loss), run_cut(pieces, runners, batch, parts)
        loss = max(loss, loss_difference(ours, reference))
        single = max(single, *gradient_differences(ours, reference).values())
        whole = max(whole, whole_difference(ours, reference))
    return loss, single, whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    worst = 0.0
    print(f"{'family':20} {'stages':>6} {'parts':>5} {'loss':>9} {'gradient':>9} {'of the whole':>12}")
    for name in options.families:
        for stages in STAGE_COUNTS:
            for parts in (1, 2):
                loss, single, whole = differences(FAMILIES[name], stages, parts)
                worst = max(worst, loss, whole)
                print(f"{name:20} {stages:6} {parts:5} {loss:9.1e} {single:9.1e} {whole:12.1e}", flush=True)
    print(f"largest of loss and whole gradient {worst:.1e}, bar {BAR}")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
