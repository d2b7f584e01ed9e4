"""How the weights of one rank lie in rows, each of which sends its largest entries. Pure; equal on all ranks.

A tensor is read as a matrix (its first dim by all others; a vector is a column) and cut into tiles of 64 x 64, or of
another form with at most as many elements where it is narrower; what is left at the right and below makes smaller
tiles. Each tile is a row. So a prime dim costs one short row in each strip, a scalar is a row of one, and a part of a
matrix that tensor parallelism cut at a multiple of 64 has the same tiles as the whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from distensor.core.update_bytes import CHUNK, check_share, kept_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A part of a matrix, cut into equal tiles of `tile_high` x `tile_wide`."""

    top: int
    left: int
    high: int
    wide: int
    tile_high: int
    tile_wide: int

    @property
    def length(self) -> int:
        """Elements of a tile."""
        return self.tile_high * self.tile_wide

    @property
    def tiles(self) -> int:
        return (self.high // self.tile_high) * (self.wide // self.tile_wide)


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
    """The rows of a list of tensors: those of equal length together, the longest first, in the order of the tensors."""

    shapes: tuple[tuple[int, ...], ...]
    chunk: int
    k: int
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def rows(self) -> int:
        return sum(block.rows for block in self.blocks)


def make_layout(shapes: Sequence[Sequence[int]], *, k: int, chunk: int = CHUNK) -> Layout:
    """Rows for tensors of these shapes, with `k` of `chunk` entries kept; of shorter rows the same share, at least one.

    Raises:
        ConfigError: a `chunk` outside 2 to 65536, or a `k` outside 1 to `chunk`.
    """
    check_share(k, chunk)
    rows: Counter[int] = Counter()
    for shape in shapes:
        for region in regions_of(shape, chunk):
            rows[region.length] += region.tiles
    blocks = [
        Block(length=length, rows=rows[length], kept=kept_of(length, k, chunk)) for length in sorted(rows, reverse=True)
    ]
    return Layout(shapes=tuple(tuple(shape) for shape in shapes), chunk=chunk, k=k, blocks=tuple(blocks))


def regions_of(shape: Sequence[int], chunk: int) -> Iterator[Region]:
    """At most four: the middle, the strip at the right, the strip below, the corner."""
    high, wide = matrix_of(shape)
    if high * wide == 0:
        return
    side = math.isqrt(chunk)
    tile_high = min(high, side)
    tile_wide = min(wide, chunk // tile_high)
    tile_high = min(high, chunk // tile_wide)
    below, right = high % tile_high, wide % tile_wide
    for (top, rows, tall), (left, columns, broad) in product(
        ((0, high - below, tile_high), (high - below, below, below)),
        ((0, wide - right, tile_wide), (wide - right, right, right)),
    ):
        if rows * columns:
            yield Region(top=top, left=left, high=rows, wide=columns, tile_high=tall, tile_wide=broad)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor read as a matrix."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
