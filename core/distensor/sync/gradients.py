"""Summing gradients over a group while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.errors import ConfigError

DEFAULT_BUCKET_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters of one dtype whose gradients travel together, followed by a mark for each that somebody has one."""

    parameters: list[Tensor]
    waiting_for: int = 0
    """Gradient accumulations still to come in this step."""
    work: dist.Work | None = None
    flat: Tensor | None = None
    """What travels. Kept between steps, with its views: new memory and new views cost more than the copy into them."""
    views: list[Tensor] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    """The parameters without a gradient of this rank, by index."""

    def launch(self, group: dist.ProcessGroup) -> int:
        """Start the all-reduce; returns how many bytes of elements take part."""
        flat = self._room()
        *views, marks = self.views
        gradients = [parameter.grad for parameter in self.parameters]
        self.missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        marks.fill_(1.0)
        for index in self.missing:
            views[index].zero_()
            marks[index] = 0.0
        here = [(view, grad.detach()) for view, grad in zip(views, gradients, strict=True) if grad is not None]
        if here:
            torch._foreach_copy_([view for view, _ in here], [gradient for _, gradient in here])
        # The group's own method: the function of torch.distributed around it costs more than a small message.
        self.work = group.allreduce([flat], _summing())
        return flat.numel() * flat.element_size()

    def _room(self) -> Tensor:
        if self.flat is None:
            sizes = [parameter.numel() for parameter in self.parameters]
            self.flat = self.parameters[0].detach().new_empty(sum(sizes) + len(sizes))
            *pieces, marks = torch.split(self.flat, [*sizes, len(sizes)])
            shaped = [piece.view(own.shape) for piece, own in zip(pieces, self.parameters, strict=True)]
            self.views = [*shaped, marks]
        return self.flat

    def collect(self) -> None:
        """Wait for the sum; gradients become views of it. Where nobody had one, None stays None."""
        assert self.work is not None, "launch comes before collect"
        self.work.wait()
        nobody = {index for index in self.missing if self.views[-1][index] == 0}
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=False)):
            if index not in nobody:
                parameter.grad = view
        self.work = None


class GradientReducer:
    """Sums the gradients of `parameters` over `group` (None, or a group of one: nothing to do).

    Every rank must pass the same parameters in the same order. Call `begin` before the first backward pass of a step
    and `finish` after the last; in between, each bucket starts travelling as soon as all its gradients are complete.
    The buckets start in the same order everywhere, whatever order the gradients come in. `see` is shown parameters
    whose gradients are complete on this rank, before they travel.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        see: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"GradientReducer(bucket_bytes={bucket_bytes}): expected at least 1")
        self._group = group if group is not None and group.size() > 1 else None
        trained = [parameter for parameter in parameters if parameter.requires_grad] if self._group else []
        self._buckets = _make_buckets(trained, bucket_bytes)
        self._see = see
        self._next = 0
        self._active = False
        self.bytes = 0
        """Bytes of gradients (and marks) that this rank gave to all-reduces since `begin`."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def begin(self, backwards: int) -> None:
        """A step starts; `backwards` backward passes will add to the gradients."""
        for bucket in self._buckets:
            bucket.waiting_for = backwards * len(bucket.parameters)
            bucket.work = None
        self._next, self.bytes, self._active = 0, 0, True

    def finish(self) -> None:
        """Wait until all sums are in the gradients.

        Parameters that got no gradient here take part with zeros; one that got none anywhere keeps None.

        Raises:
            PeerLostError, TransportTimeoutError, TransportError: the group could not finish.
        """
        self._active = False
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.collect()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            if self._active:
                if bucket.work is not None:
                    raise ConfigError("more backward passes reached a parameter than GradientReducer.begin was told")
                bucket.waiting_for -= 1
                if bucket.waiting_for <= 0:
                    self._launch_complete()

        return on_gradient

    def _launch_complete(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting_for <= 0:
            self._launch_next()

    def _launch_next(self) -> None:
        assert self._group is not None, "without a group there are no buckets"
        bucket = self._buckets[self._next]
        if self._see is not None:
            self._see(bucket.parameters)
        self.bytes += bucket.launch(self._group)
        self._next += 1


def _make_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[_Bucket]:
    """Last parameters first: their gradients are complete first."""
    buckets: list[_Bucket] = []
    open_lists: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in reversed(parameters):
        current = open_lists.setdefault((parameter.dtype, parameter.device), [])
        if current and _bytes_of(current) + _bytes_of([parameter]) > bucket_bytes:
            buckets.append(_Bucket(current))
            current = open_lists[parameter.dtype, parameter.device] = []
        current.append(parameter)
    return [*buckets, *(_Bucket(current) for current in open_lists.values() if current)]


def _summing() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = True
    return options


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
