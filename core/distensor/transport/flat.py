"""Tensors as the collectives want them: flat, contiguous, on the CPU; slices, never whole storages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distensor.core.errors import ConfigError


def flat_source(tensor: Tensor) -> Tensor:
    """The elements to send; the tensor's own memory if that is contiguous on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)


class Target:
    """A tensor to be written by a collective; `flat` is its memory or a stand-in that `store` copies back."""

    __slots__ = ("_tensor", "flat")

    def __init__(self, tensor: Tensor, *, load: bool) -> None:
        """`load` says whether the present values matter."""
        plain = tensor.detach()
        direct = plain.device.type == "cpu" and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
        self._tensor = None if direct else plain
        if direct:
            self.flat = plain.view(-1)
        elif load:
            self.flat = flat_source(plain).clone()
        else:
            self.flat = torch.empty(plain.numel(), dtype=plain.dtype)

    def store(self) -> None:
        if self._tensor is not None:
            self._tensor.copy_(self.flat.view(self._tensor.shape))


def even_pieces(flat: Tensor, members: int, what: str) -> list[Tensor]:
    """Cut into equal pieces.

    Raises:
        ConfigError: it does not divide.
    """
    if flat.numel() % members != 0:
        raise ConfigError(f"{what}: {flat.numel()} elements cannot be cut into {members} equal pieces")
    return list(torch.split(flat, flat.numel() // members)) if flat.numel() else [flat] * members


def split_rows(tensor: Tensor, flat: Tensor, sizes: Sequence[int], members: int, what: str) -> list[Tensor]:
    """Cut `flat`, the elements of `tensor`, along dim 0 by `sizes`, or evenly when there are none.

    Raises:
        ConfigError: the sizes do not add up.
    """
    if not sizes:
        return even_pieces(flat, members, what)
    rows = tensor.shape[0] if tensor.dim() else 0
    if len(sizes) != members or sum(sizes) != rows:
        raise ConfigError(f"{what}: split sizes {list(sizes)} do not cut {rows} rows into {members} pieces")
    row = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [size * row for size in sizes]))
