"""Tensors of any rank as the rows of a layout, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distensor.optim.distro.layout import Layout, Region, matrix_of, regions_of


class Packing:
    """Where the tiles of each tensor lie in the rows of a layout.

    Args:
        layout: made from the shapes of the tensors that `pack` and `unpack` get, in that order.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        block_of = {block.length: i for i, block in enumerate(layout.blocks)}
        self._places = [
            [(region, block_of[region.length]) for region in regions_of(shape, layout.chunk)] for shape in layout.shapes
        ]

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A matrix (rows, length) float32 for each block. The tensors are copied."""
        parts: list[list[Tensor]] = [[] for _ in self.layout.blocks]
        for tensor, places in zip(tensors, self._places, strict=True):
            for region, block in places:
                parts[block].append(_tiles(tensor, region))
        return [torch.cat(rows).to(torch.float32) for rows in parts]

    def unpack(self, matrices: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Write the rows into `tensors`, which are contiguous and of any float dtype."""
        at = [0 for _ in matrices]
        for tensor, places in zip(tensors, self._places, strict=True):
            for region, block in places:
                rows = matrices[block][at[block] : at[block] + region.tiles]
                at[block] += region.tiles
                _write(tensor, region, rows)

    def zeros(self, device: torch.device) -> list[Tensor]:
        """Empty sums for all rows."""
        return [torch.zeros(block.rows, block.length, device=device) for block in self.layout.blocks]


def _part(tensor: Tensor, region: Region) -> Tensor:
    """The region as (tiles down, tile height, tiles across, tile width), a view where the tensor is contiguous."""
    matrix = tensor.reshape(matrix_of(tensor.shape))
    part = matrix[region.top : region.top + region.high, region.left : region.left + region.wide]
    down, across = region.high // region.tile_high, region.wide // region.tile_wide
    return part.view(down, region.tile_high, across, region.tile_wide)


def _tiles(tensor: Tensor, region: Region) -> Tensor:
    return _part(tensor, region).transpose(1, 2).reshape(region.tiles, region.length)


def _write(tensor: Tensor, region: Region, rows: Tensor) -> None:
    part = _part(tensor.view(matrix_of(tensor.shape)), region)
    down, _, across, _ = part.shape
    part.copy_(rows.view(down, across, region.tile_high, region.tile_wide).transpose(1, 2))
