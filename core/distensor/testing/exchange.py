"""Workers as threads of one process that exchange messages through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Loses: TypeAlias = Callable[[int, int], bool]
"""(round, rank of the sender) -> whether that message is lost, for everybody."""


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int, loses: Loses = lambda _round, _rank: False) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.loses = loses
        self.messages: list[bytes] = [b""] * size
        self.tensors: list[Tensor] = [torch.zeros(0)] * size


class ThreadExchange:
    """An `Exchange` for one thread of a meeting."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting
        self._round = 0

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        meeting = self._meeting
        meeting.messages[self.rank] = message
        meeting.barrier.wait()
        lost = [meeting.loses(self._round, rank) for rank in range(self.size)]
        answer = [None if lost[rank] else meeting.messages[rank] for rank in range(self.size)]
        self._round += 1
        meeting.barrier.wait()
        return answer

    def mean(self, tensor: Tensor) -> None:
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor.clone()
        meeting.barrier.wait()
        total = torch.stack(meeting.tensors).sum(dim=0).div_(self.size)
        meeting.barrier.wait()
        tensor.copy_(total)
