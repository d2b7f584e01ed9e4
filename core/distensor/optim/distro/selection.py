"""The largest entries of each row, rounded to what travels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distensor.optim.distro.codec import LOWEST, Magnitudes, Rows, code_of, magnitude_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What the rows of one block send, and the same as tensors: places and values, (rows, kept)."""

    rows: Rows
    places: Tensor
    values: Tensor


def select(matrix: Tensor, kept: int, value_bits: int) -> Selection:
    """The `kept` entries of each row with the largest magnitude; of equal ones, any, but the same on each run.

    All of them take the mean magnitude of the row's entries (with two bits: of those below and above that mean), as the
    nearest code has it. A row of zeros sends nothing.

    Args:
        matrix: (rows, length) float32 on any device, finite.
    """
    places = torch.topk(matrix.abs(), kept, dim=1, sorted=False).indices.sort(dim=1).values
    chosen = matrix.gather(1, places).cpu()
    magnitude = chosen.abs()
    rows = _one_bit(places, chosen, magnitude) if value_bits == 1 else _two_bits(places, chosen, magnitude)
    return Selection(rows=rows, places=places, values=torch.from_numpy(rows.values()).to(matrix.device))


def _one_bit(places: Tensor, chosen: Tensor, magnitude: Tensor) -> Rows:
    codes = code_of(magnitude.mean(dim=1).numpy())
    return Rows(places=places.cpu().numpy(), negative=(chosen < 0).numpy(), codes=codes)


def _two_bits(places: Tensor, chosen: Tensor, magnitude: Tensor) -> Rows:
    large = magnitude > magnitude.mean(dim=1, keepdim=True)
    above = large.sum(dim=1).clamp(min=1)
    below = (~large).sum(dim=1).clamp(min=1)
    small_mean = (magnitude * ~large).sum(dim=1) / below
    large_mean = (magnitude * large).sum(dim=1) / above
    codes = code_of(small_mean.numpy())
    codes_large = code_of(large_mean.numpy())
    # A row whose small entries vanish still sends its large ones: the small ones take the lowest magnitude there is.
    codes = np.where(codes_large > 0, codes.clip(min=LOWEST), codes)
    return Rows(
        places=places.cpu().numpy(),
        negative=(chosen < 0).numpy(),
        codes=codes,
        large=large.numpy(),
        codes_large=codes_large.clip(min=codes),
    )


def add_rows(matrix: Tensor, rows: Rows, scales: Magnitudes | None = None) -> None:
    """Add what one worker sent to (rows, length) sums, each row times its scale. The places of a row differ: no order
    changes it."""
    values = rows.values() if scales is None else rows.values() * scales[:, None]
    places = torch.from_numpy(rows.places).to(matrix.device)
    matrix.scatter_add_(1, places, torch.from_numpy(values).to(matrix.device, matrix.dtype))


def count_rows(matrix: Tensor, rows: Rows) -> None:
    """Add one for each place that one worker sent."""
    places = torch.from_numpy(rows.places).to(matrix.device)
    sent = torch.from_numpy(magnitude_of(rows.codes) > 0).to(matrix.device, matrix.dtype)
    matrix.scatter_add_(1, places, sent[:, None].expand(places.shape))
