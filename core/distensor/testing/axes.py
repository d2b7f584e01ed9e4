"""Ranks of the axes tp and cp as threads of one process: collectives by meeting at a table.

For tests of partitioned programs. A rank that raises ends the waiting of all others, so nothing hangs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from distensor.core.parallel import Axis
from distensor.program.axes import AxisGroup, Reduction

R = TypeVar("R")
_TIMEOUT = 60.0


class MeetingError(RuntimeError):
    """The ranks did not call the same collective, one of them ended, or nobody came in time."""


class Meeting:
    """Where the ranks of one group meet: the n-th call of each brings what it has and takes what all brought."""

    def __init__(self, size: int, timeout: float = _TIMEOUT) -> None:
        self.size = size
        self.calls: list[str] = []
        """The collectives that were called, in order."""
        self._timeout = timeout
        self._condition = threading.Condition()
        self._brought: dict[int, dict[int, tuple[str, Any]]] = {}
        self._left: dict[int, int] = {}
        self._broken: BaseException | None = None

    def exchange(self, call: int, rank: int, what: str, payload: Any) -> list[Any]:
        """Everyone's payload by rank."""
        with self._condition:
            table = self._brought.setdefault(call, {})
            table[rank] = (what, payload)
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._broken or len(table) == self.size, self._timeout):
                raise MeetingError(f"rank {rank} waited {self._timeout} s in {what}; there are {sorted(table)}")
            if len(table) < self.size:
                raise MeetingError(f"rank {rank} in {what}: another rank ended") from self._broken
            return self._take(call, rank, table)

    def _take(self, call: int, rank: int, table: dict[int, tuple[str, Any]]) -> list[Any]:
        if len({what for what, _ in table.values()}) > 1:
            raise MeetingError(f"rank {rank}: the ranks call { ({at: what for at, (what, _) in table.items()}) }")
        self._left[call] = self._left.get(call, 0) + 1
        if self._left[call] == 1:
            self.calls.append(table[rank][0])
        if self._left[call] == self.size:
            del self._brought[call], self._left[call]
        return [table[at][1] for at in range(self.size)]

    def end(self, error: BaseException) -> None:
        """One rank is gone: nobody waits any longer."""
        with self._condition:
            self._broken = self._broken or error
            self._condition.notify_all()


class ThreadGroup:
    """One rank's view of a Meeting: an AxisGroup."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._counter = itertools.count()
        self.rank = rank
        self.size = meeting.size

    def _exchange(self, what: str, payload: Any) -> list[Any]:
        return self._meeting.exchange(next(self._counter), self.rank, what, payload)

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        brought = self._exchange(f"all_reduce {op} {tensor.dtype} {list(tensor.shape)}", tensor.detach().clone())
        return _sum(brought) if op is Reduction.SUM else torch.stack(brought).amax(0)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        assert tensor.shape[dim] == sizes[self.rank], (tensor.shape, sizes, dim)
        brought = self._exchange(f"all_gather {list(sizes)} {dim} {tensor.dtype}", tensor.detach().clone())
        return torch.cat(brought, dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        brought = self._exchange(f"reduce_scatter {list(sizes)} {dim}", tensor.detach().clone())
        return _sum(brought).narrow(dim, sum(sizes[: self.rank]), sizes[self.rank]).contiguous()

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        brought = self._exchange("all_to_all", [part.detach().clone() for part in parts])
        received: list[Tensor] = [sent[self.rank] for sent in brought]
        assert [list(part.shape) for part in received] == [list(shape) for shape in shapes]
        return received

    def shift(self, tensor: Tensor, steps: int, shape: Sequence[int]) -> Tensor:
        brought = self._exchange(f"shift {steps}", tensor.detach().clone())
        received: Tensor = brought[(self.rank - steps) % self.size]
        assert list(received.shape) == list(shape), (received.shape, shape)
        return received


def _sum(parts: Sequence[Tensor]) -> Tensor:
    own = parts[0].dtype
    wide = torch.float32 if own.is_floating_point and own.itemsize < 4 else None
    return torch.stack(list(parts)).sum(0, dtype=wide).to(own)


class Grid:
    """All ranks of a grid such as {Axis.TP: 2, Axis.CP: 2} with their meetings; the first axis varies fastest."""

    def __init__(self, sizes: Mapping[Axis, int], timeout: float = _TIMEOUT) -> None:
        self.sizes = dict(sizes)
        self.meetings: dict[tuple[Axis, tuple[int, ...]], Meeting] = {}
        slow_first = [range(size) for size in reversed(self.sizes.values())]
        self.coordinates = [
            dict(zip(self.sizes, reversed(place), strict=True)) for place in itertools.product(*slow_first)
        ]
        self._timeout = timeout

    def groups(self, place: Mapping[Axis, int]) -> dict[Axis, AxisGroup]:
        """The groups of the rank at `place`."""
        return {axis: ThreadGroup(self._meeting(axis, place), place[axis]) for axis in self.sizes}

    def _meeting(self, axis: Axis, place: Mapping[Axis, int]) -> Meeting:
        key = (axis, tuple(rank for other, rank in place.items() if other is not axis))
        return self.meetings.setdefault(key, Meeting(self.sizes[axis], self._timeout))

    def run(self, function: Callable[[Mapping[Axis, int], Mapping[Axis, AxisGroup]], R]) -> list[R]:
        """`function(place, groups)` on a thread for every rank; results in the order of `coordinates`.

        Raises what the first rank that failed raised.
        """
        groups = [self.groups(place) for place in self.coordinates]
        runs = [_Run(self, function, *pair) for pair in zip(self.coordinates, groups, strict=True)]
        threads = [threading.Thread(target=run, daemon=True) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [run.error for run in runs if run.error is not None]
        if failed:
            raise next((error for error in failed if not isinstance(error, MeetingError)), failed[0])
        return [run.result for run in runs]

    def end(self, error: BaseException) -> None:
        for meeting in self.meetings.values():
            meeting.end(error)


class _Run:
    """One rank's thread."""

    def __init__(self, grid: Grid, function: Callable[..., Any], place: Any, groups: Any) -> None:
        self._grid = grid
        self._call = (function, place, groups)
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        function, place, groups = self._call
        try:
            self.result = function(place, groups)
        except BaseException as error:  # noqa: BLE001  whatever a rank dies of must end the others too
            self.error = error
            self._grid.end(error)
