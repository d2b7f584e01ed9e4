"""A pipeline over torch.distributed's point-to-point messages: single transfers, and whole steps of a schedule.

The order of actions is `distensor.core.schedules`' business; here each action is carried out. Every message has its own
tag (stage, micro-batch, direction), so that the order of sends and receives does not matter; a backend must honour tags
(gloo and our own do).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.distributed.accessors import get_pp_group
from distensor.core.distributed.agreement import agree, check_member, check_same, members
from distensor.core.distributed.broadcasting import device_of
from distensor.core.distributed.state import PP, current
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.schedules import Action, Phase, Schedule, actions_of_rank, check_schedule, parse_schedule

Stage: TypeAlias = Callable[[Tensor], Tensor]
Loss: TypeAlias = Callable[[Tensor, int], Tensor]

MOST_DIMS = 8
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_WHOLE_BACKWARDS = (Schedule.GPIPE, Schedule.LOOPED_BFS, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
_TAGS_OF_A_BORDER = 3
_HEADER, _DATA, _GRADIENT = range(_TAGS_OF_A_BORDER)


class PPScheduler:
    """This process's place in a pipeline.

    Args:
        group: the ranks of the pipeline, first stage first; None means the mesh's pipeline group.
        device: where received tensors are put; None means where the group's backend wants them.

    Raises:
        ConfigError: there is no such group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.group = check_member(get_pp_group() if group is None else group)
        self.device = device_of(self.group) if device is None else device
        self._received: deque[tuple[Tensor, dist.Work]] = deque()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def isend_next(self, tensor: Tensor) -> dist.Work:
        """Start sending to the next stage (from the last one, to the first); `tensor` must not change until `wait`."""
        return _work(dist.isend(tensor.detach().contiguous(), self._neighbour(1), group=self.group))

    def irecv_prev(self, buffer: Tensor) -> dist.Work:
        """Start receiving into `buffer` from the stage before (at the first one, from the last)."""
        return _work(dist.irecv(buffer, self._neighbour(-1), group=self.group))

    def recv_prev_data(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of the stage before."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.irecv_prev(buffer).wait()
        return buffer

    def queue_irecv_prev(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start receiving; `queue_irecv_prev_data` returns the tensors in the order of these calls."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._received.append((buffer, self.irecv_prev(buffer)))

    def queue_irecv_prev_data(self) -> Tensor:
        """The oldest queued tensor, once it is there.

        Raises:
            ConfigError: nothing is queued.
        """
        if not self._received:
            raise ConfigError("nothing was queued: call queue_irecv_prev(shape, dtype) first")
        buffer, work = self._received.popleft()
        work.wait()
        return buffer

    def step(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[Tensor] | None = None,
        *,
        micro_batches: int,
        loss: Loss | None = None,
        schedule: str = "1f1b",
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are added to the parameters' `.grad`.

        What is differentiated is the sum of the micro-batches' losses: for their mean, divide in `loss`. Micro-batches
        may differ in shape. One tensor crosses each border.

        Args:
            stages: this rank's stages; the k-th of rank r is stage k * size + r of the pipeline.
            inputs: one tensor for each micro-batch; on the first rank only.
            loss: from the last stage's output and the micro-batch's number to a scalar; on the last rank only.
            schedule: a name that `distensor.core.schedules` knows.

        Returns:
            The losses by micro-batch on the last rank, nothing on the others.

        Raises:
            ConfigError: inputs or loss are missing or at the wrong rank.
            GroupMismatchError: other arguments on some rank; on every rank.
        """
        self._agree(stages, inputs, micro_batches, loss, schedule)
        run = _Run(self, stages, inputs or (), loss)
        total = len(stages) * self.size
        for action in actions_of_rank(
            _runnable(schedule), rank=self.rank, ranks=self.size, stages=total, micro_batches=micro_batches
        ):
            run.act(action)
        return run.finish()

    def _agree(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[Tensor] | None,
        micro_batches: int,
        loss: Loss | None,
        schedule: str,
    ) -> None:
        def described() -> dict[str, Any]:
            check_schedule(_runnable(schedule), ranks=self.size, stages=len(stages) * self.size)
            if (len(inputs or ()) != micro_batches) if self.rank == 0 else (inputs is not None):
                raise ConfigError(
                    f"inputs: expected {micro_batches} tensors, one for each micro-batch, on the first rank of the "
                    "pipeline, and None on all others"
                )
            if (loss is None) == (self.rank == self.size - 1):
                raise ConfigError("loss: expected a function on the last rank of the pipeline, and None on all others")
            return {"stages": len(stages), "micro_batches": micro_batches, "schedule": schedule}

        calls = agree(self.group, "PPScheduler.step", described)
        for name in calls[0]:
            check_same(self.group, calls, name, f"{name} differs")

    def _neighbour(self, step: int) -> int:
        if self.size == 1:
            raise ConfigError("the pipeline has one rank: there is no neighbour to send to or receive from")
        return members(self.group)[(self.rank + step) % self.size]


@dataclass(slots=True)
class _Kept:
    """A micro-batch between its forward and its backward action."""

    given: Tensor
    result: Tensor
    sending: list[tuple[dist.Work, Tensor]]


@dataclass(slots=True)
class _Run:
    """One step."""

    scheduler: PPScheduler
    stages: Sequence[Stage]
    inputs: Sequence[Tensor]
    loss: Loss | None
    kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    local: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def act(self, action: Action) -> None:
        if action.phase is Phase.FORWARD:
            self._forward(action.stage, action.micro_batch)
        else:
            self._backward(action.stage, action.micro_batch)

    def finish(self) -> list[Tensor]:
        for work, _ in self.sending:
            work.wait()
        return [self.losses[micro] for micro in sorted(self.losses)]

    @property
    def _count(self) -> int:
        return len(self.stages) * self.scheduler.size

    def _forward(self, stage: int, micro: int) -> None:
        given = self.inputs[micro] if stage == 0 else self._receive_activation(stage, micro)
        result = self.stages[stage // self.scheduler.size](given)
        sending: list[tuple[dist.Work, Tensor]] = []
        if stage < self._count - 1:
            sending = self._send_activation(result, stage + 1, micro)
        elif self.loss is not None:
            result = self.loss(result, micro)
            self.losses[micro] = result.detach()
        self.kept[stage, micro] = _Kept(given, result, sending)

    def _backward(self, stage: int, micro: int) -> None:
        kept = self.kept.pop((stage, micro))
        if kept.result.requires_grad:
            gradient = None if stage == self._count - 1 else self._receive_gradient(kept.result, stage + 1, micro)
            torch.autograd.backward(kept.result, gradient)
        # Where a gradient has come back, the activation has arrived; its memory is given back now.
        for work, _ in kept.sending:
            work.wait()
        if stage > 0 and kept.given.requires_grad:
            gradient = torch.zeros_like(kept.given) if kept.given.grad is None else kept.given.grad
            self._send(gradient, stage - 1, self._tag(stage, micro, _GRADIENT), self.sending)

    def _send_activation(self, result: Tensor, to: int, micro: int) -> list[tuple[dist.Work, Tensor]]:
        sending: list[tuple[dist.Work, Tensor]] = []
        self._send(_header(result).to(self.scheduler.device), to, self._tag(to, micro, _HEADER), sending)
        self._send(result.detach(), to, self._tag(to, micro, _DATA), sending)
        return sending

    def _receive_activation(self, stage: int, micro: int) -> Tensor:
        header = torch.empty(MOST_DIMS + 3, dtype=torch.int64)
        header = self._receive(header, stage - 1, self._tag(stage, micro, _HEADER))
        dtype, needs_gradient, ndim, *sizes = header.tolist()
        buffer = torch.empty(sizes[:ndim], dtype=_DTYPES[dtype])
        data = self._receive(buffer, stage - 1, self._tag(stage, micro, _DATA))
        return data.requires_grad_(bool(needs_gradient))

    def _receive_gradient(self, like: Tensor, sender: int, micro: int) -> Tensor:
        return self._receive(torch.empty_like(like, requires_grad=False), sender, self._tag(sender, micro, _GRADIENT))

    def _tag(self, stage: int, micro: int, kind: int) -> int:
        """`stage` is the later one of a border."""
        return (micro * self._count + stage) * _TAGS_OF_A_BORDER + kind

    def _send(self, tensor: Tensor, stage: int, tag: int, sending: list[tuple[dist.Work, Tensor]]) -> None:
        owner = stage % self.scheduler.size
        if owner == self.scheduler.rank:
            self.local[tag] = tensor.clone()
        elif tensor.numel() > 0:
            flat = _bytes(tensor)
            destination = members(self.scheduler.group)[owner]
            sending.append((_work(dist.isend(flat, destination, group=self.scheduler.group, tag=tag)), flat))

    def _receive(self, like: Tensor, stage: int, tag: int) -> Tensor:
        owner = stage % self.scheduler.size
        if owner == self.scheduler.rank:
            return self.local.pop(tag)
        buffer = torch.empty(like.shape, dtype=like.dtype, device=self.scheduler.device)
        if buffer.numel() > 0:
            source = members(self.scheduler.group)[owner]
            _work(dist.irecv(_bytes(buffer), source, group=self.scheduler.group, tag=tag)).wait()
        return buffer


def _runnable(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        ConfigError: there is none, or it takes backward passes apart, which only the Trainer does.
    """
    schedule = parse_schedule(name)
    if schedule not in _WHOLE_BACKWARDS:
        raise UnsupportedOptionError(
            f"PPScheduler runs {', '.join(_WHOLE_BACKWARDS)}; schedule={name!r} takes backward passes apart"
        )
    return schedule


def _header(tensor: Tensor) -> Tensor:
    if tensor.ndim > MOST_DIMS or tensor.dtype not in _DTYPES:
        raise ConfigError(
            f"a stage returned {tensor.dtype} of shape {tuple(tensor.shape)}; expected at most {MOST_DIMS} dims and "
            f"one of {', '.join(map(str, _DTYPES))}"
        )
    sizes = [*tensor.shape, *[0] * (MOST_DIMS - tensor.ndim)]
    return torch.tensor([_DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.ndim, *sizes])


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes: backends know fewer dtypes than torch."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ConfigError("this rank is not in the group")
    return work


@dataclass(slots=True)
class _Holder:
    scheduler: PPScheduler | None = None


_holder = _Holder()


def init_pp_scheduler() -> None:
    """Make the scheduler of the mesh's pipeline.

    Raises:
        ConfigError: there is no mesh, or it has a scheduler already.
    """
    if _alive() is not None:
        raise ConfigError("pipeline model parallel scheduler is already initialized")
    _holder.scheduler = PPScheduler()


def pp_scheduler() -> PPScheduler:
    """The scheduler of the mesh's pipeline.

    Raises:
        ConfigError: `init_pp_scheduler` has not been called for this mesh.
    """
    scheduler = _alive()
    if scheduler is None:
        raise ConfigError("pipeline model parallel scheduler is not initialized; call init_pp_scheduler() first")
    return scheduler


def pp_scheduler_is_initialized() -> bool:
    return _alive() is not None


def _alive() -> PPScheduler | None:
    """A scheduler lives as long as its mesh."""
    mesh, scheduler = current(), _holder.scheduler
    alive = mesh is not None and scheduler is not None and scheduler.group is mesh.groups[PP]
    return scheduler if alive else None
