"""The collectives of a program over a process group: `distensor.program.axes.AxisGroup` as the worker has it.

All ranks of an axis run the same list of actions, so their collectives come in the same order and never cross.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core import SYSTEM_CLOCK, Clock
from distensor.program.axes import Reduction
from distensor.transport.group import TransportGroup

_HALVES = (torch.bfloat16, torch.float16)
_OPERATIONS: Mapping[Reduction, Any] = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MAX: dist.ReduceOp.MAX}


class ProcessGroupAxis:
    """An axis over `group`, whose members are in the order of their places on the axis.

    The group's own methods are called: the functions of torch.distributed around them cost more than a small message.
    Parts of different size need a backend that takes them, as "distensor" does. That one also adds 16-bit reals in 32
    bits wherever they are added, so they travel as they are; with another one they are widened before. `seconds` is
    how long this rank has been in collectives so far, waiting included: time that is not its own compute.
    """

    def __init__(self, group: dist.ProcessGroup, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.seconds = 0.0
        self.bind(group)

    def bind(self, group: dist.ProcessGroup) -> None:
        """Talk over `group` from now on: in another epoch the same place of an axis of the same size has another."""
        self._group = group
        self._adds_wide = isinstance(group, TransportGroup)
        self.rank = group.rank()
        self.size = group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        result = self._addable(tensor).clone(memory_format=torch.contiguous_format)
        started = self._clock.monotonic()
        all_reduce_at_once(self._group, result, op)
        self.seconds += self._clock.monotonic() - started
        return result.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        shapes = [_resized(tensor.shape, dim, size) for size in sizes]
        options = _at_once(dist.distributed_c10d.AllgatherOptions())
        if dim == 0:  # the parts lie one after the other: no copy at the end
            joined = tensor.new_empty(_resized(tensor.shape, 0, sum(sizes)))
            self._run(self._group.allgather, [list(torch.split(joined, list(sizes)))], [_plain(tensor)], options)
            return joined
        parts = [tensor.new_empty(shape) for shape in shapes]
        self._run(self._group.allgather, [parts], [_plain(tensor)], options)
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        parts = [_plain(part) for part in torch.split(self._addable(tensor), list(sizes), dim)]
        result = torch.empty_like(parts[self.rank])
        options = _at_once(dist.ReduceScatterOptions())
        options.reduceOp = dist.ReduceOp.SUM
        self._run(self._group.reduce_scatter, [result], [parts], options)
        return result.to(tensor.dtype)

    def _addable(self, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        return own if self._adds_wide or own.dtype not in _HALVES else own.float()

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        results = [parts[self.rank].new_empty(tuple(shape)) for shape in shapes]
        options = _at_once(dist.AllToAllOptions())
        self._run(self._group.alltoall, results, [_plain(part) for part in parts], options)
        return results

    def shift(self, tensor: Tensor, steps: int, shape: Sequence[int]) -> Tensor:
        """The send is queued before anybody waits for a message, so a ring of any length cannot lock up."""
        result = tensor.new_empty(tuple(shape))
        if steps % self.size == 0:
            return result.copy_(tensor.detach())
        sent = self._group.send([_plain(tensor)], (self.rank + steps) % self.size, 0)
        self._run(self._group.recv, [result], (self.rank - steps) % self.size, 0)
        sent.wait()
        return result

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        started = self._clock.monotonic()
        collective(*arguments).wait()
        self.seconds += self._clock.monotonic() - started


def all_reduce_at_once(group: dist.ProcessGroup, tensor: Tensor, op: Reduction) -> None:
    """Reduce `tensor` in place, in the caller's thread where nothing of the group is before it."""
    options = _at_once(dist.AllreduceOptions())
    options.reduceOp = _OPERATIONS[op]
    group.allreduce([tensor], options).wait()


def _at_once(options: Any) -> Any:
    """Somebody waits for it: the collective may run in the caller's thread."""
    options.asyncOp = False
    return options


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def _resized(shape: Sequence[int], dim: int, extent: int) -> list[int]:
    resized = list(shape)
    resized[dim] = extent
    return resized
