"""Tensors of any rank as the rows of a layout, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distensor.optim.distro.layout import Layout


class Packing:
    """Where each tensor lies in the rows of a layout: its full rows in the first block, its rest in that of its length.

    Args:
        layout: made from the sizes of the tensors that `pack` and `unpack` get, in that order.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._block_of = {block.length: i for i, block in enumerate(layout.blocks)}

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A matrix (rows, length) float32 for each block. The tensors are copied."""
        parts: list[list[Tensor]] = [[] for _ in self.layout.blocks]
        for tensor in tensors:
            full, rest = self._split(tensor)
            for part in (full, rest):
                if part.numel():
                    length = self.layout.chunk if part is full else part.numel()
                    parts[self._block_of[length]].append(part.reshape(-1, length))
        return [torch.cat(rows).to(torch.float32) for rows in parts]

    def unpack(self, matrices: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Write the rows into `tensors`, which have any float dtype and any strides."""
        at = [0 for _ in matrices]
        for tensor in tensors:
            flat = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
            for part, length in zip(
                self._split(flat), (self.layout.chunk, flat.numel() % self.layout.chunk), strict=True
            ):
                if part.numel():
                    block = self._block_of[length]
                    rows = part.numel() // length
                    part.copy_(matrices[block][at[block] : at[block] + rows].reshape(-1))
                    at[block] += rows
            tensor.copy_(flat.view(tensor.shape))

    def zeros(self, device: torch.device) -> list[Tensor]:
        """Empty sums for all rows."""
        return [torch.zeros(block.rows, block.length, device=device) for block in self.layout.blocks]

    def _split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        flat = tensor.reshape(-1)
        full = flat.numel() // self.layout.chunk * self.layout.chunk
        return flat[:full], flat[full:]
