"""CPU time of one rank of tensor parallelism beside one process with the whole model: forward and backward.

The rank's peers are silent: a sum over the ranks gives back what it was given and parts of others are zeros, so what is
measured is the rank's own work and the operations around its collectives, no transport and no waiting. The numbers that
such a rank computes are wrong, its time is not. Both take turns; the table has medians of ratios.

    python benchmarks/tensor.py [--families llama gpt2] [--ranks 2] [--sizes 2x16 4x64 4x256]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from distensor.core.parallel import Axis
from distensor.nn import Shard, ShardingSpec
from distensor.program import Captured, StageRunner, capture, cut, partition
from distensor.program.axes import Reduction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "program"))
from partition_specs import SPECS
from program_families import FAMILIES

ROUNDS = 15
STEPS = 4
"""Of each side in one round."""


class SilentGroup:
    """A group whose other ranks say nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        del op
        return tensor.clone()

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
        return torch.cat([tensor if rank == self.rank else tensor.new_zeros(s) for rank, s in enumerate(shapes)], dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        return tensor.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank]).clone()

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        return [parts[0].new_zeros(tuple(shape)) for shape in shapes]

    def shift(self, tensor: Tensor, steps: int, shape: Sequence[int]) -> Tensor:
        del steps
        return tensor.new_zeros(tuple(shape))


def _runner(captured: Captured, axes: dict[Axis, SilentGroup] | None = None) -> StageRunner:
    pieces = cut(captured)
    return StageRunner(pieces.programs[0], pieces.weights(0), axes=axes)


def _seconds(runner: StageRunner, inputs: dict[str, Tensor]) -> float:
    start = time.thread_time()
    for _ in range(STEPS):
        runner.forward(inputs)[str(runner.program.loss)].backward()
        for parameter in runner.parameters.values():
            parameter.grad = None
    return (time.thread_time() - start) / STEPS


def _measure(name: str, ranks: int, rows: int, length: int) -> tuple[float, float, float]:
    """(milliseconds of one process, of one rank, median of the ratios)."""
    family = FAMILIES[name]
    captured = capture(family.build(), family.batch(*family.sizes[0]), loss=family.loss)
    shapes = {key: spec.shape for key, spec in captured.parameters.items()}
    rules = ShardingSpec(SPECS[name]).resolve(shapes)
    made = partition(captured, {k: r.dim if isinstance(r, Shard) else None for k, r in rules.items()}, tensor=ranks)
    inputs = cut(captured).flatten_batch(family.batch(rows, length))
    whole, part = _runner(captured), _runner(made.captured(), {Axis.TP: SilentGroup(0, ranks)})
    for runner in (whole, part):
        _seconds(runner, inputs)
    pairs = [(_seconds(whole, inputs), _seconds(part, inputs)) for _ in range(ROUNDS)]
    one, other = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
    return one, other, statistics.median(second / first for first, second in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["llama", "gpt2"], choices=sorted(SPECS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["2x16", "4x64", "4x256"], help="rows x length")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| family | tokens | one process, CPU ms | one rank, CPU ms | ratio |\n|---|---|---|---|---|")
    for name in options.families:
        for size in options.sizes:
            rows, length = map(int, size.split("x"))
            one, other, ratio = _measure(name, options.ranks, rows, length)
            print(f"| {name} | {size} | {one:.1f} | {other:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
