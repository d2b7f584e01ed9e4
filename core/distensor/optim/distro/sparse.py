"""What the sparse optimizers have in common: residuals out, messages in, one update that all workers apply alike.

A step has two halves. `propose` takes the gradients into the residual, makes a message of its largest entries and takes
what was sent out of the residual again: only this worker's own state changes. `apply` takes everybody's messages and
changes the weights by nothing else, so that workers that got the same messages stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.errors import ConfigError
from distensor.optim.distro.codec import Rows, decode, encode
from distensor.optim.distro.exchange import Exchange, exchange_of
from distensor.optim.distro.layout import Layout, make_layout
from distensor.optim.distro.packing import Packing
from distensor.optim.distro.protection import CopyWatch, Exchanged, Scales, copied, lost_most, row_factors
from distensor.optim.distro.selection import add_rows, select

RESIDUAL = "residual"
SHARED = "shared"
MASTER = "master"
_HALF = (torch.bfloat16, torch.float16)


class _Pending:
    """The exchange of the last step, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        self._under_way: tuple[bytes, Future[Sequence[bytes | None]]] | None = None

    @property
    def begun(self) -> bool:
        return self._under_way is not None

    def begin(self, message: bytes, exchange: Exchange) -> None:
        self._under_way = message, self._thread.submit(exchange.gather, message)

    def end(self) -> tuple[bytes, Future[Sequence[bytes | None]]]:
        """The own message and, once they are there, everybody's."""
        assert self._under_way is not None
        ended, self._under_way = self._under_way, None
        return ended


class SparseOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that exchange the largest entries of a residual.

    Args:
        k: entries of each chunk that travel.
        chunk: elements of a chunk, a square of the matrix that the parameter is (`layout.py`).
        value_bits: 1 for a sign and one magnitude a chunk; 2 for two magnitudes.
        delay: apply what was exchanged one step later, so that computing hides the exchange.
        look_ahead: with `delay`, compute gradients where this worker's own pending update leads to: until the next step
            its weights differ from the others' by that.
        group: the workers; None for the default group, or this process alone. With `delay` it has to be a group that
            nothing else uses, since the exchange runs beside the script.
        exchange: instead of `group`, any other way to the workers.
        clip_messages: a message with more than so many times the median norm is scaled down to that; None: none is.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        k: int,
        chunk: int,
        value_bits: int,
        delay: bool,
        look_ahead: bool,
        group: dist.ProcessGroup | None,
        exchange: Exchange | None,
        clip_messages: float | None = 4.0,
    ) -> None:
        super().__init__(params, defaults)
        self._clip_messages = clip_messages
        self._copies = CopyWatch()
        self.exchanged = Exchanged()
        """What there was to notice about the newest exchange."""
        if value_bits not in (1, 2):
            raise ConfigError(f"value_bits = {value_bits}; expected 1 or 2")
        self._value_bits = value_bits
        self._tensors = [p for group_ in self.param_groups for p in group_["params"] if p.requires_grad]
        for parameter in self._tensors:
            if parameter.dtype in _HALF:
                self.state[parameter][MASTER] = parameter.detach().to(torch.float32)
        self._device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self._exchange = exchange or exchange_of(group, self._device)
        self.layout: Layout = self._make_layout(k, chunk)
        self._packing = Packing(self.layout)
        self._look_ahead = look_ahead
        self._pending = _Pending() if delay else None
        self.applied = 0
        """Exchanges whose outcome is in the weights: equal on workers that hold the same."""
        self.dropped = 0
        """Own contributions that were not finite and were neither sent nor kept."""
        self.bytes_sent = self.bytes_received = 0
        """Of messages, since the start: what this worker sent once, and what it got of the others."""

    def _make_layout(self, k: int, chunk: int) -> Layout:
        return make_layout([p.shape for p in self._tensors], k=k, chunk=chunk)

    # For subclasses

    def _sources(self) -> Iterator[Tensor]:
        """What goes into the residuals and has to be finite."""
        return (p.grad for p in self._tensors if p.grad is not None)

    def _forget(self) -> None:
        """The sources were not finite and are not used: drop what is spoiled by them."""

    def _accumulate(self) -> None:
        """Take the gradients into the residuals."""
        raise NotImplementedError

    def _update(self, mean: Sequence[Tensor]) -> None:
        """Change the weights by the workers' mean, one tensor of the parameter's shape for each of `_tensors`."""
        raise NotImplementedError

    def _pack(self, residuals: Sequence[Tensor]) -> list[Tensor]:
        return self._packing.pack(residuals)

    def _unpack(self, matrices: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        self._packing.unpack(matrices, into)

    def _combine(self, updates: Sequence[list[Rows]], scales: Scales, late: int) -> list[Tensor]:
        """The workers' updates, in the order of their ranks, as the sum divided by their number.

        `late` ones count as if they had come: their senders keep them, and they count as much when they come.
        """
        sums = self._sum(updates, scales)
        for matrix in sums:
            matrix.div_(max(1, len(updates) + late))
        return sums

    def _sum(self, updates: Sequence[list[Rows]], scales: Scales) -> list[Tensor]:
        sums = self._packing.zeros(self._device)
        for update, own in zip(updates, scales, strict=True):
            for matrix, rows, scale in zip(sums, update, own, strict=True):
                add_rows(matrix, rows, scale)
        return sums

    def _with_groups(self, mean: Sequence[Tensor]) -> Iterator[tuple[Tensor, dict[str, Any], Tensor]]:
        """What to update, with its group and the workers' mean: the weights, or their master of single precision."""
        means = dict(zip(self._tensors, mean, strict=True))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in means:
                    yield self._target(parameter), group, means[parameter]

    def _target(self, parameter: Tensor) -> Tensor:
        target: Tensor = self.state[parameter].get(MASTER, parameter)
        return target

    def _round_masters(self) -> None:
        for parameter in self._tensors:
            if MASTER in self.state[parameter]:
                parameter.copy_(self.state[parameter][MASTER])

    # The two halves of a step

    @torch.no_grad()
    def propose(self) -> bytes:
        """This worker's message for the present gradients; empty where they are not finite numbers. Once a step."""
        if not all(bool(torch.isfinite(tensor.sum())) for tensor in self._sources()):
            self.dropped += 1
            self._forget()
            return b""
        self._accumulate()
        residuals = [self.state[p][RESIDUAL] for p in self._tensors]
        matrices = self._pack(residuals)
        chosen = [
            select(matrix, block.kept, self._value_bits)
            for matrix, block in zip(matrices, self.layout.blocks, strict=True)
        ]
        for matrix, selection in zip(matrices, chosen, strict=True):
            matrix.scatter_add_(1, selection.places, -selection.values)
        self._unpack(matrices, residuals)
        return encode(self.layout, [selection.rows for selection in chosen])

    @torch.no_grad()
    def apply(self, messages: Sequence[bytes | None]) -> None:
        """The update that everybody's messages make, by rank. None and empty ones are of workers that sent nothing.

        Raises:
            FrameError: a message that is not one of this layout.
        """
        self.applied += 1
        senders = [rank for rank, message in enumerate(messages) if message]
        updates = [decode(self.layout, message) for message in messages if message]
        scales = row_factors(updates, self._clip_messages)
        self._apply(updates, scales, late=sum(message is None for message in messages))
        judged = zip(senders, updates, scales, strict=True)
        self.exchanged = Exchanged(
            silent=tuple(rank for rank, message in enumerate(messages) if not message),
            clipped=tuple(rank for rank, update, scale in judged if lost_most(update, scale)),
            copies=self._copies.see((senders[one], senders[other]) for one, other in copied(self.layout, updates)),
        )

    def _apply(self, updates: Sequence[list[Rows]], scales: Scales, late: int = 0) -> None:
        mean = [torch.empty(p.shape, device=p.device) for p in self._tensors]
        self._unpack(self._combine(updates, scales, late), mean)
        self._update(mean)
        self._round_masters()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Both halves and the exchange between them. All workers call it equally often."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance()
        return loss

    def _advance(self) -> None:
        if self._pending is None:
            self._exchange_and_apply(self.propose())
        else:
            self._step_late(self._pending)

    def _exchange_and_apply(self, message: bytes) -> None:
        with self._undone_unless_it_ends(message):
            messages = self._exchange.gather(message)
        self._exchanged(message, messages)

    @contextmanager
    def _undone_unless_it_ends(self, message: bytes) -> Iterator[None]:
        """Where an exchange fails, this worker is where it was before it, as far as others can tell."""
        try:
            yield
        except BaseException:  # whatever ended it, an interrupt included, must not leave it half done
            if message:
                self._undo(message)
            raise

    def _undo(self, message: bytes) -> None:
        self.take_back(message)

    def _exchanged(self, message: bytes, messages: Sequence[bytes | None]) -> None:
        self.count(message, messages)
        if message and messages[self._exchange.rank] is None:
            self.take_back(message)
        self.apply(messages)

    @torch.no_grad()
    def take_back(self, message: bytes) -> None:
        """All workers have left this message of ours out: what it took out of the residuals is in them again."""
        residuals = [self._residual_of(p) for p in self._tensors]
        matrices = self._pack(residuals)
        for matrix, rows in zip(matrices, decode(self.layout, message), strict=True):
            add_rows(matrix, rows)
        self._unpack(matrices, residuals)

    def count(self, message: bytes, messages: Sequence[bytes | None]) -> None:
        """Add one exchange to the counters."""
        self.bytes_sent += len(message)
        self.bytes_received += sum(len(m or b"") for m in messages) - len(message)

    # One step late

    @torch.no_grad()
    def _step_late(self, pending: _Pending) -> None:
        message = self.propose()
        with self._undone_unless_it_ends(message):
            self.settle()
        pending.begin(message, self._exchange)
        if self._look_ahead and message:
            self._save_shared()
            updates = [decode(self.layout, message)]
            self._apply(updates, row_factors(updates, None))

    @torch.no_grad()
    def settle(self) -> None:
        """Apply what is still on its way, so that all workers have the same weights: before saving or evaluating.

        Where it raises, the exchange has failed: the weights are those before it, and nothing is on its way.
        """
        if self._pending is None or not self._pending.begun:
            return
        message, arriving = self._pending.end()
        self._restore_shared()
        with self._undone_unless_it_ends(message):
            messages = arriving.result()
        self._exchanged(message, messages)

    def shared_weights(self) -> list[Tensor]:
        """What all workers have in common now, a tensor for each trained parameter."""
        return [self.state[p].get(SHARED, self._target(p).detach()) for p in self._tensors]

    def _save_shared(self) -> None:
        for parameter in self._tensors:
            self.state[parameter][SHARED] = self._target(parameter).detach().clone()

    def _restore_shared(self) -> None:
        for parameter in self._tensors:
            shared = self.state[parameter].pop(SHARED, None)
            if shared is not None:
                self._target(parameter).copy_(shared)
        self._round_masters()

    # State

    def state_dict(self) -> dict[str, Any]:
        """As every optimizer's; the residuals are in it.

        Raises:
            ConfigError: an exchange is on its way, which only `settle` on all workers ends.
        """
        if self._pending is not None and self._pending.begun:
            raise ConfigError("the exchange of the last step is still on its way: call settle() on all workers first")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's, but nothing is rounded to the dtype of a parameter."""
        super().load_state_dict(state_dict)
        restore_exactly(self, state_dict)

    def _residual_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if RESIDUAL not in state:
            state[RESIDUAL] = torch.zeros(parameter.shape, device=parameter.device)
        residual: Tensor = state[RESIDUAL]
        return residual


def restore_exactly(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Put the tensors of a state back with their own dtypes: torch casts them to the parameter's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for field, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][field] = value.detach().to(parameter.device).clone()
