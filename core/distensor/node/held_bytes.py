"""How much memory a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class HeldBytes:
    """Bytes of the memory blocks that autograd kept, each counted once."""

    total: int = 0


@contextmanager
def counting_held_bytes(weights: Collection[Tensor]) -> Iterator[HeldBytes]:
    """Count what autograd keeps inside the block; `weights` are there anyhow and do not count."""
    held = HeldBytes()
    seen = {weight.untyped_storage().data_ptr() for weight in weights}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield held
