"""How the workers' messages reach each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.optim.distro.agreement import used_by_all

Arrives: TypeAlias = Callable[[int, int], bool]
"""(round, rank of the sender) -> whether that message reached this worker; its own always does."""


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

    Args:
        arrives: which messages reach this worker, where some do not (tests lose them on purpose). The workers then
            agree in a second round on those that all of them have; None spares that round. All give one, or none.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, *, arrives: Arrives | None = None
    ) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None, "torch.distributed is initialised"
        self._group = found
        self._device = device
        self._arrives = arrives
        self._round = 0
        self.rank = found.rank()
        self.size = found.size()

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        messages = self._gather_all(message)
        if self._arrives is None:
            return messages
        here = [rank == self.rank or self._arrives(self._round, rank) for rank in range(self.size)]
        self._round += 1
        used = used_by_all([[bool(had) for had in view] for view in self.share(here)])
        return [each if is_used else None for each, is_used in zip(messages, used, strict=True)]

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        """A few whole numbers of each worker, by rank; all give equally many."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        found = [torch.zeros_like(own) for _ in range(self.size)]
        self._group.allgather([found], [own]).wait()
        return [each.tolist() for each in found]

    def _gather_all(self, message: bytes) -> list[bytes]:
        counts = [count for (count,) in self.share([len(message)])]
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
