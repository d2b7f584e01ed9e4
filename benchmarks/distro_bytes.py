"""Bytes of a sparse update for the shapes of a Llama of 1.2 billion parameters, really encoded, beside the prediction.

The updates are random numbers of the right shapes, tensor by tensor so that they fit into memory; each tensor is a
message of its own here, which costs 20 bytes more than one message for all. Real updates are less even: their places
cluster, and their code is somewhat shorter.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import torch

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.update_bytes import message_bytes
from distensor.optim.distro.codec import decode, encode
from distensor.optim.distro.layout import make_layout
from distensor.optim.distro.packing import Packing
from distensor.optim.distro.selection import select

LAYERS, HIDDEN, INNER, VOCABULARY = 16, 2048, 8192, 32000


def shapes() -> Iterator[tuple[tuple[int, ...], int]]:
    """Each shape and how many tensors have it: attention and gated feed-forward of Llama, embedding and head apart."""
    yield (HIDDEN, HIDDEN), 4 * LAYERS
    yield (INNER, HIDDEN), 2 * LAYERS
    yield (HIDDEN, INNER), LAYERS
    yield (HIDDEN,), 2 * LAYERS + 1
    yield (VOCABULARY, HIDDEN), 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, nargs="*", default=[2, 8, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parameters = sum(math.prod(shape) * count for shape, count in shapes())
    print(f"{parameters:,} parameters, dense bf16 {2 * parameters / 1e6:,.1f} MB")
    names = ("k of 4096", "bits a value", "MB", "predicted", "select s", "encode s", "decode s")
    print("".join(f"{name:>13}" for name in names))
    for k in arguments.k:
        for value_bits in (1, 2):
            print(_row(k, value_bits, parameters), flush=True)
    return 0


def _row(k: int, value_bits: int, parameters: int) -> str:
    size, seconds = 0, [0.0, 0.0, 0.0]
    generator = torch.Generator().manual_seed(0)
    for shape, count in shapes():
        layout = make_layout([shape], k=k)
        tensor = torch.randn(shape, generator=generator)
        times = [SYSTEM_CLOCK.monotonic()]
        matrices = Packing(layout).pack([tensor])
        rows = [select(m, b.kept, value_bits).rows for m, b in zip(matrices, layout.blocks, strict=True)]
        times.append(SYSTEM_CLOCK.monotonic())
        message = encode(layout, rows)
        times.append(SYSTEM_CLOCK.monotonic())
        decode(layout, message)
        times.append(SYSTEM_CLOCK.monotonic())
        size += len(message) * count
        seconds = [s + (b - a) * count for s, a, b in zip(seconds, times, times[1:], strict=False)]
    predicted = message_bytes(parameters, k, value_bits)
    figures = (k, value_bits, f"{size / 1e6:.2f}", f"{predicted / 1e6:.2f}", *(f"{s:.2f}" for s in seconds))
    return "".join(f"{figure:>13}" for figure in figures)


if __name__ == "__main__":
    sys.exit(main())
