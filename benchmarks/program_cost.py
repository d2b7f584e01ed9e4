"""What a stage program costs against the eager module: forward and backward of a small transformer, 4x64 tokens.

Eager and program runs alternate, and the ratio is that of the medians. The bar is 1.05.

    python benchmarks/program_cost.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distensor.program import StageRunner, capture, cut, run_module

BAR = 1.05


def _families() -> Any:
    path = Path(__file__).parents[1] / "tests" / "program" / "program_families.py"
    spec = importlib.util.spec_from_file_location("program_families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.FAMILIES


def measure(module: nn.Module, batch: Any, loss: Any, rounds: int) -> tuple[float, float]:
    """Median seconds of eager and of the program, each a forward and a backward pass."""
    pieces = cut(capture(module, batch, loss=loss))
    runner = StageRunner(pieces.programs[0], pieces.weights(0))
    flat = pieces.flatten_batch(batch)
    name = str(runner.program.loss)

    def eager() -> None:
        module.zero_grad(set_to_none=True)
        run_module(module, batch, loss).backward()

    def program() -> None:
        for parameter in runner.parameters.values():
            parameter.grad = None
        runner.forward(flat, seed=0)[name].backward()

    times: dict[Callable[[], None], list[float]] = {eager: [], program: []}
    for index in range(rounds + 5):
        for work in (eager, program) if index % 2 else (program, eager):
            started = time.perf_counter()
            work()
            if index >= 5:
                times[work].append(time.perf_counter() - started)
    return statistics.median(times[eager]), statistics.median(times[program])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--families", nargs="*", default=["llama", "gpt2", "transformer_encoder"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    families = _families()
    gc.disable()
    worst = 0.0
    print(f"{'family':22} {'eager ms':>10} {'program ms':>11} {'ratio':>7}")
    for name in options.families:
        family = families[name]
        eager, program = measure(family.build(), family.batch(4, 64), family.loss, options.rounds)
        worst = max(worst, program / eager)
        print(f"{name:22} {eager * 1e3:10.2f} {program * 1e3:11.2f} {program / eager:7.3f}")
    print(f"worst ratio {worst:.3f}, bar {BAR}")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
