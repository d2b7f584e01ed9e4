"""How the workers' messages reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(Protocol):
    """The workers of one group. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Of this worker, 0 to size - 1."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        """Everybody's message by rank, equal on all workers; None for one that did not reach all of them."""
        ...

    def mean(self, tensor: Tensor) -> None:
        """Replace a float tensor by the mean over all workers, equal to the bit on all of them."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        return [message]

    def mean(self, tensor: Tensor) -> None:
        """The mean of one is itself."""


class GroupExchange:
    """The ranks of a torch.distributed group, over its backend. With None: the default group, or nobody else.

    Lengths differ, so they travel first. A backend that loses messages fails; nothing is lost without an error.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None, "torch.distributed is initialised"
        self._group = found
        self._device = device
        self.rank = found.rank()
        self.size = found.size()

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        own = torch.tensor([len(message)], dtype=torch.int64, device=self._device)
        lengths = [torch.zeros_like(own) for _ in range(self.size)]
        self._group.allgather([lengths], [own]).wait()
        counts = [int(length) for length in lengths]
        if not any(counts):
            return [b""] * self.size
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self._device)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._group.allgather([parts], [padded]).wait()
        return [part[:count].cpu().numpy().tobytes() for part, count in zip(parts, counts, strict=True)]

    def mean(self, tensor: Tensor) -> None:
        self._group.allreduce([tensor]).wait()
        tensor.div_(self.size)


def exchange_of(group: dist.ProcessGroup | None, device: torch.device) -> Exchange:
    """The group's workers; this process alone where torch.distributed was not set up."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return GroupExchange(group, device)
