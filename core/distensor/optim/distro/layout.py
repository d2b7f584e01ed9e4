"""How the weights of one rank lie in rows, each of which sends its largest entries. Pure; equal on all ranks.

A tensor of n elements is read flat: full rows of `chunk` elements and one shorter row for the rest. So a prime size
costs one short row, never a row of its own for every element, and a scalar is a row of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distensor.core.errors import ConfigError

CHUNK = 4096
"""Elements of a full row: 64 x 64."""
MAX_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """`rows` rows of `length` elements, each of which sends `kept` of them."""

    length: int
    rows: int
    kept: int

    @property
    def entries(self) -> int:
        return self.rows * self.kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The rows of tensors with `sizes` elements: the full rows of all of them, then the shorter ones by length."""

    sizes: tuple[int, ...]
    chunk: int
    k: int
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def rows(self) -> int:
        return sum(block.rows for block in self.blocks)


def make_layout(sizes: Sequence[int], *, k: int, chunk: int = CHUNK) -> Layout:
    """Rows for tensors of these sizes, with `k` of `chunk` entries kept; of shorter rows the same share, at least one.

    Raises:
        ConfigError: a `chunk` outside 2 to 65536, or a `k` outside 1 to `chunk`.
    """
    if not 2 <= chunk <= MAX_CHUNK:
        raise ConfigError(f"chunk = {chunk}; expected 2 to {MAX_CHUNK} elements")
    if not 1 <= k <= chunk:
        raise ConfigError(f"k = {k}; expected 1 to {chunk}, of {chunk} elements of a chunk")
    full = sum(size // chunk for size in sizes)
    shorter = sorted(size % chunk for size in sizes if size % chunk)
    blocks = [Block(length=chunk, rows=full, kept=k)] if full else []
    blocks.extend(
        Block(length=length, rows=shorter.count(length), kept=kept_of(length, k, chunk))
        for length in sorted(set(shorter), reverse=True)
    )
    return Layout(sizes=tuple(sizes), chunk=chunk, k=k, blocks=tuple(blocks))


def kept_of(length: int, k: int, chunk: int) -> int:
    """How many of a row of `length` travel: the share k / chunk, rounded, at least one."""
    return min(length, max(1, round(length * k / chunk)))


def rice_parameter(length: int, kept: int) -> int:
    """Bits of the fixed part of a coded gap, for `kept` sorted places in a row of `length`.

    The gaps are nearly geometric with mean m = (length - kept) / (kept + 1). A code of them then has b + 1 bits and
    1 / (exp(2**b / m) - 1) more on average; the best b is that of the shortest.
    """
    mean = (length - kept) / (kept + 1)
    if mean <= 0:
        return 0
    return min(range(length.bit_length()), key=lambda b: b + 1.0 / math.expm1(min(700.0, 2.0**b / mean)))
