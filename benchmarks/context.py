"""Attention over a sequence cut among ranks: how even the work is, bytes of each method, and its CPU time.

    python benchmarks/context.py [--length 2048] [--ranks 4] [--repeat 3] [--json]

The ranks are threads of this process with one torch thread each; CPU time is that of a rank's thread, forward and
backward. Bytes are those that a rank hands to others, counted at the collectives and compared with the formula. `whole`
is torch's own attention over the whole sequence in one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from distensor.core.compute import ContextAttention
from distensor.core.parallel import Axis
from distensor.core.sequence import HeadTail, tiles
from distensor.program.attention import Heads, attention
from distensor.program.attention_tiles import TILE
from distensor.program.axes import AxisGroup, Reduction
from distensor.testing.axes import Grid

ROWS, HEADS, GROUPS, WIDTH = 1, 8, 2, 64


@dataclass
class Counting:
    """A group that counts the bytes which leave its rank."""

    group: AxisGroup
    sent: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        self.sent += 2 * tensor.nbytes * (self.size - 1) // self.size
        return self.group.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        self.sent += tensor.nbytes * (self.size - 1)
        return self.group.all_gather(tensor, sizes, dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        self.sent += tensor.nbytes - tensor.nbytes * sizes[self.rank] // sum(sizes)
        return self.group.reduce_scatter(tensor, sizes, dim)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        self.sent += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        return self.group.all_to_all(parts, shapes)

    def shift(self, tensor: Tensor, steps: int, shape: Sequence[int]) -> Tensor:
        self.sent += tensor.nbytes
        return self.group.shift(tensor, steps, shape)


@dataclass(kw_only=True)
class Run:
    """One forward and backward pass of all ranks."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Who owns what of the sequence."""

    lengths: list[int]
    owners: list[int]

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        stops = [sum(self.lengths[: index + 1]) for index in range(len(self.lengths))]
        found = zip(self.owners, self.lengths, stops, strict=True)
        return [(stop - length, stop) for owner, length, stop in found if owner == rank]

    def pairs(self, rank: int) -> int:
        every = [(0, sum(self.lengths))]
        return sum(tile.pairs for tile in tiles(self.chunks(rank), every, causal=True, size=TILE))


def head_tail(length: int, ranks: int) -> Cut:
    division = HeadTail(ranks=ranks)
    cuts = division.cuts(length)
    return Cut(lengths=[b - a for a, b in pairwise(cuts)], owners=list(division.owners))


def contiguous(length: int, ranks: int) -> Cut:
    cuts = [length * rank // ranks for rank in range(ranks + 1)]
    return Cut(lengths=[b - a for a, b in pairwise(cuts)], owners=list(range(ranks)))


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    shapes = ((ROWS, HEADS, length, WIDTH), (ROWS, GROUPS, length, WIDTH), (ROWS, GROUPS, length, WIDTH))
    query, key, value = (torch.randn(shape) for shape in shapes)
    return query, key, value


def timed(function: Callable[[], Tensor]) -> float:
    """CPU seconds of this thread for a forward and backward pass."""
    start = time.thread_time()
    out = function()
    out.backward(torch.ones_like(out))
    return time.thread_time() - start


def run_cut(cut: Cut, method: ContextAttention, ranks: int) -> Run:
    whole = inputs(sum(cut.lengths))

    def rank(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> tuple[float, int]:
        group = Counting(groups[Axis.CP])
        index = torch.cat([torch.arange(*chunk) for chunk in cut.chunks(place[Axis.CP])])
        query, key, value = (tensor[:, :, index].clone().requires_grad_() for tensor in whole)
        seconds = timed(lambda: attention(group, query, key, value, None, True, None, cut.lengths, cut.owners, method))
        return seconds, group.sent

    found = Grid({Axis.CP: ranks}).run(rank)
    return Run(seconds=[seconds for seconds, _ in found], sent=[sent for _, sent in found])


def run_whole(length: int) -> float:
    query, key, value = (tensor.requires_grad_() for tensor in inputs(length))
    return timed(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))


def predicted(method: ContextAttention, length: int, ranks: int) -> int:
    """Bytes that rank 0 sends, of 4 a number: keys and values and their gradients, or all heads of its chunks."""
    share, both = length // ranks, 2 * ROWS * GROUPS * WIDTH * 4
    if method is ContextAttention.ALL_GATHER:
        return 2 * (ranks - 1) * share * both
    if method is ContextAttention.RING:
        return (3 * ranks - 2) * share * both
    heads = Heads.of_queries(HEADS, ranks)
    queries, keys = (_others(item) for item in (heads, heads.of_keys(GROUPS)))
    own, own_keys = (stop - start for start, stop in (heads.ranges[0], heads.of_keys(GROUPS).ranges[0]))
    there = share * ROWS * WIDTH * 4 * (queries + 2 * keys)
    back = share * ROWS * WIDTH * 4 * (ranks - 1) * (own + 2 * own_keys)
    return there + back + share * ROWS * WIDTH * 4 * ((ranks - 1) * own + queries)


def _others(heads: Heads) -> int:
    """Heads that rank 0 sends to the other ranks."""
    return sum(stop - start for start, stop in heads.ranges[1:])


def measure(length: int, ranks: int, repeat: int) -> list[dict[str, object]]:
    whole = statistics.median(run_whole(length) for _ in range(repeat))
    rows: list[dict[str, object]] = [{"cut": "one process", "method": "torch", "seconds": whole}]
    plain, folded = contiguous(length, ranks), head_tail(length, ranks)
    rows.append(_row("contiguous", plain, ContextAttention.ALL_GATHER, (ranks, repeat), whole))
    rows.extend(_row("head-tail", folded, method, (ranks, repeat), whole) for method in ContextAttention)
    return rows


def _row(name: str, cut: Cut, method: ContextAttention, times: tuple[int, int], whole: float) -> dict[str, object]:
    ranks, repeat = times
    runs = [run_cut(cut, method, ranks) for _ in range(repeat)]
    slowest = statistics.median(max(run.seconds) for run in runs)
    pairs = [cut.pairs(rank) for rank in range(ranks)]
    return {
        "cut": name,
        "method": method.value,
        "seconds": slowest,
        "of_whole": slowest * ranks / whole,
        "pairs_max_over_mean": max(pairs) * ranks / sum(pairs),
        "cpu_max_over_mean": statistics.median(max(run.seconds) * ranks / sum(run.seconds) for run in runs),
        "sent": runs[0].sent[0],
        "predicted": predicted(method, sum(cut.lengths), ranks),
    }


def show(rows: Sequence[Mapping[str, object]]) -> None:
    print(
        f"{'cut':12}{'method':12}{'CPU s':>9}{'x ranks / whole':>17}{'pairs max/mean':>16}{'sent':>12}{'formula':>12}"
    )
    for row in rows:
        print(
            f"{row['cut']!s:12}{row['method']!s:12}{row['seconds']:9.3f}{row.get('of_whole', 1.0):17.2f}"
            f"{row.get('pairs_max_over_mean', 1.0):16.2f}{row.get('sent', 0):12,}{row.get('predicted', 0):12,}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.length, options.ranks, options.repeat)
    print(json.dumps(rows)) if options.json else show(rows)
    return 0 if all(row.get("sent") == row.get("predicted") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
