"""What recomputed activations save and cost: bytes that wait for a backward pass, CPU time of a step, of one stage.

A decoder of four layers at 8 x 128 tokens, in fp32 and bf16. Kept are the tensors that autograd holds between forward
and backward, and the inputs of recomputed parts, each storage once, without parameters and batch. Modes take turns.

    python benchmarks/recompute.py [--rounds 15] [--width 256]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Mapping

import torch
from four_d import Size, batch, declared, next_token  # type: ignore[import-not-found]  # beside this script
from torch import Tensor, nn

from distensor.core.compute import Precision, Recompute
from distensor.program import Cut, StageRunner, capture, cut


def storages() -> dict[int, int]:
    """Address -> bytes of every tensor that Python can see."""
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}


def kept_bytes(runner: StageRunner, flat: Mapping[str, Tensor]) -> int:
    """Bytes that live only because the backward pass is still to come."""
    runner.forward(flat, seed=0)
    before = storages()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]):
        results = runner.forward(flat, seed=0)
    after = storages()
    assert results
    return sum(size for pointer, size in after.items() if pointer not in before)


def step_seconds(runner: StageRunner, flat: Mapping[str, Tensor]) -> float:
    """CPU time of forward and backward."""
    for parameter in runner.parameters.values():
        parameter.grad = None
    started = time.process_time()
    runner.forward(flat, seed=0)[str(runner.program.loss)].backward()
    return time.process_time() - started


def compare(pieces: Cut, example: object, rounds: int) -> dict[Recompute, tuple[int, float]]:
    """(kept bytes, median CPU seconds) of each mode."""
    flat = pieces.flatten_batch(example)
    runners = {mode: StageRunner(pieces.programs[0], pieces.weights(0), recompute=mode) for mode in Recompute}
    kept = {mode: kept_bytes(runner, flat) for mode, runner in runners.items()}
    times: dict[Recompute, list[float]] = {mode: [] for mode in runners}
    for _ in range(rounds):
        for mode, runner in runners.items():
            times[mode].append(step_seconds(runner, flat))
    return {mode: (kept[mode], statistics.median(times[mode])) for mode in runners}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    example = batch(Size(width=options.width, rows=8, length=128))
    print("| precision | recompute | kept, MB | of none | CPU, ms | of none |")
    print("|---|---|---|---|---|---|")
    for precision in Precision:
        module = declared("dp", options.width).module
        graph = capture(
            module.train(), example, loss=lambda outputs, given: next_token(outputs, given[1]), precision=precision
        )
        found = compare(cut(graph), example, options.rounds)
        whole, fastest = found[Recompute.NONE]
        for mode, (kept, seconds) in found.items():
            print(
                f"| {precision} | {mode} | {kept / 1e6:.1f} | {kept / whole:.2f} | {seconds * 1e3:.1f} | "
                f"{seconds / fastest:.2f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
