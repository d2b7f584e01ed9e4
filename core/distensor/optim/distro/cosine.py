"""The orthonormal cosine transform of the tiles of a tensor (DCT-II; Ahmed, Natarajan and Rao, 1974)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

SIDE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """A tensor as (matrices, high, wide), padded to (matrices, rows * side_high, columns * side_wide).

    A dim of n is cut into ceil(n / 64) tiles of equal size, the last one padded: 65 makes two of 33, not two of 64.
    """

    shape: tuple[int, ...]
    matrices: int
    high: int
    wide: int
    rows: int
    columns: int

    @property
    def side_high(self) -> int:
        return -(-self.high // self.rows)

    @property
    def side_wide(self) -> int:
        return -(-self.wide // self.columns)

    @property
    def coefficients(self) -> int:
        return self.matrices * self.rows * self.side_high * self.columns * self.side_wide


def tiles_of(shape: tuple[int, ...]) -> Tiles:
    """The tiles of the last two dims; a vector is one row, a scalar one element."""
    high, wide = (1, 1, *shape)[-2:]
    matrices = math.prod(shape[:-2])
    empty = math.prod(shape) == 0
    return Tiles(
        shape=shape,
        matrices=0 if empty else matrices,
        high=high,
        wide=wide,
        rows=max(1, -(-high // SIDE)),
        columns=max(1, -(-wide // SIDE)),
    )


def transform(tensor: Tensor, tiles: Tiles) -> Tensor:
    """The coefficients, flat, tile after tile."""
    if tiles.coefficients == 0:
        return tensor.new_zeros(0, dtype=torch.float32)
    matrices = tensor.to(torch.float32).reshape(tiles.matrices, tiles.high, tiles.wide)
    tall, broad = tiles.rows * tiles.side_high, tiles.columns * tiles.side_wide
    padded = pad(matrices, (0, broad - tiles.wide, 0, tall - tiles.high))
    blocks = padded.reshape(tiles.matrices, tiles.rows, tiles.side_high, tiles.columns, tiles.side_wide)
    blocks = blocks.transpose(2, 3)
    basis = _basis(tiles.side_high).to(blocks), _basis(tiles.side_wide).to(blocks)
    return (basis[0] @ blocks @ basis[1].T).reshape(-1)


def inverse(coefficients: Tensor, tiles: Tiles) -> Tensor:
    """The tensor that `transform` made these coefficients of; what falls into the padding is lost."""
    if tiles.coefficients == 0:
        return coefficients.reshape(tiles.shape)
    shape = (tiles.matrices, tiles.rows, tiles.columns, tiles.side_high, tiles.side_wide)
    blocks = coefficients.reshape(shape)
    basis = _basis(tiles.side_high).to(blocks), _basis(tiles.side_wide).to(blocks)
    padded = (basis[0].T @ blocks @ basis[1]).transpose(2, 3)
    tall, broad = tiles.rows * tiles.side_high, tiles.columns * tiles.side_wide
    return padded.reshape(tiles.matrices, tall, broad)[:, : tiles.high, : tiles.wide].reshape(tiles.shape)


@cache
def _basis(size: int) -> Tensor:
    """Row k: sqrt(2 / n) cos(pi (i + 1/2) k / n), the first one by 1 / sqrt(2). Float32, computed in float64."""
    i = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (i[None, :] + 0.5) * i[:, None]) * math.sqrt(2.0 / size)
    basis[:1] /= math.sqrt(2.0)
    return basis.to(torch.float32)
