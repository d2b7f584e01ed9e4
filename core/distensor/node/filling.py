"""A rank that takes part in steps while its weights still come from others, tensor by tensor.

It has the programs and takes part in every sum with nothing of its own to add, so it knows each step's summed gradients
and what was decided, as all ranks do. A weight that is `missing` is left alone. One that was `ordered` is copied by a
source between two steps: from then on its gradients are kept, and once the copy is here they are applied to it in their
order, each as a step of its own. Optimizers treat each weight by itself, so it then holds what its source holds, to the
bit. The memory for that is bounded by what is ordered at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distensor.core.errors import ProgramRejectedError

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.step_report import Update
    from distensor.optim.updater import Updater

FIRST_ORDER_BYTES = 16 << 20
MOST_ORDER_BYTES = 256 << 20
"""Of weights, from each source at a time; their optimizer's state comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Missed:
    """A step's gradient of one weight, None where nobody had one."""

    gradient: Tensor | None
    update: Update


class Filling:
    """What is missing on one rank.

    Args:
        weights: all parameters and buffers of the rank by "stage/name", the living ones.
        updater: of the parameters that are trained.
    """

    def __init__(self, weights: Mapping[str, Tensor], updater: Updater) -> None:
        self._weights = dict(weights)
        self._updater = updater
        self._missing = dict.fromkeys(self._weights)
        self._ordered: dict[str, list[_Missed]] = {}
        self._order_bytes = FIRST_ORDER_BYTES

    @property
    def left(self) -> int:
        """How many weights are not here yet."""
        return len(self._missing) + len(self._ordered)

    @property
    def ordered(self) -> bool:
        """Whether some are on their way."""
        return bool(self._ordered)

    def order(self, sources: Sequence[int], *, in_time: bool) -> dict[int, list[str]]:
        """What to ask each of the sources for now, between two steps. `in_time`: all that was asked for the last time
        was here at the next look, so that more may be asked for at once."""
        if in_time:
            self._order_bytes = min(2 * self._order_bytes, MOST_ORDER_BYTES)
        wanted: dict[int, list[str]] = {}
        for source in sources:
            if chosen := self._some():
                wanted[source] = chosen
                self._ordered.update((key, []) for key in chosen)
        return wanted

    def _some(self) -> list[str]:
        """The next ones, as many as may be ordered of one source; at least one."""
        size, chosen = 0, list[str]()
        for key in self._missing:
            size += self._weights[key].nbytes
            if chosen and size > self._order_bytes:
                break
            chosen.append(key)
        for key in chosen:
            del self._missing[key]
        return chosen

    def give_up_orders(self) -> None:
        """The sources are others now: what has not come has to be asked for again."""
        self.give_up(list(self._ordered))

    def give_up(self, keys: Iterable[str]) -> None:
        """Those of `keys` that have not come have to be asked for again."""
        for key in keys:
            if self._ordered.pop(key, None) is not None:
                self._missing[key] = None

    def carry_out(self, update: Update) -> None:
        """The update that a step has decided on, as far as weights are here."""
        trained = self._updater.trainable
        for key, missed in self._ordered.items():
            if key in trained:
                gradient = trained[key].grad
                missed.append(_Missed(gradient=None if gradient is None else gradient.clone(), update=update))
        absent = self._missing.keys() | self._ordered.keys()
        self._updater.step(update.lr, update.scale, exchange=update.exchange, only=trained.keys() - absent)

    def fill(self, key: str, weight: Tensor, fields: Mapping[str, Tensor]) -> None:
        """`weight` and its optimizer's state have come, as they were when `key` was ordered.

        Raises:
            ProgramRejectedError: nobody ordered it, or it has another shape or dtype.
            ConfigError: the state is not this optimizer's.
        """
        target = self._weights.get(key)
        if target is None or key not in self._ordered:
            raise ProgramRejectedError(f"{key[:100]!r} came, which was not asked for")
        if (target.shape, target.dtype) != (weight.shape, weight.dtype):
            raise ProgramRejectedError(f"{key!r} came as {tuple(weight.shape)} {weight.dtype}: no such weight here")
        with torch.no_grad():
            target.copy_(weight)
        if key in self._updater.trainable:
            self._updater.take_over(key, fields)
        self._catch_up(key, self._ordered.pop(key))

    def _catch_up(self, key: str, missed: Iterable[_Missed]) -> None:
        parameter = self._updater.trainable.get(key)
        if parameter is None:
            return
        present = parameter.grad
        for each in missed:
            parameter.grad = each.gradient
            self._updater.step(each.update.lr, each.update.scale, only={key})
        parameter.grad = present
