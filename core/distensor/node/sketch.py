"""A few numbers that stand for a gradient, and cannot be had without it.

Of each tensor: its scalar product with a fixed pattern of signs, and its norm. Two honest computations of the same
gradient give the same numbers, up to rounding; a gradient that is scaled, stale, partly left out or made up gives
others. The signs repeat after a prime number of elements, so that they line up with no dim of a tensor: there is no
shorter way to the product than by all elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from distensor.node.faults import STALE, Cheat
from distensor.optim.clipping import wide

PERIOD = 65_521

Sketch: TypeAlias = dict[str, tuple[float, float]]
"""(product, norm) by "stage/name"."""


class Sketcher:
    """Of one job: ranks with the same `seed` use the same signs."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (PERIOD,), generator=generator).mul_(2).sub_(1).to(torch.float32)

    def of(self, gradient: Tensor) -> Tensor:
        """(product, norm) of one gradient, on its device: nobody has waited for it yet."""
        flat = gradient.detach().reshape(-1).to(torch.float32)
        signs, kind = self._signs_on(flat.device), wide(flat)
        rows, rest = divmod(flat.numel(), PERIOD)
        product = torch.dot(flat[rows * PERIOD :], signs[:rest]).to(kind)
        if rows:
            sums = torch.mv(flat[: rows * PERIOD].view(rows, PERIOD), signs)
            # Each row has a sign of its own, from the other end of the pattern, and again after a period of rows.
            others = signs.flip(0).repeat(rows // PERIOD + 1)[:rows]
            product = product + torch.dot(sums.to(kind), others.to(kind))
        return torch.stack((product, torch.linalg.vector_norm(flat).to(kind)))

    def of_all(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Of those that have a gradient, as `of`."""
        return {key: self.of(parameter.grad) for key, parameter in parameters if parameter.grad is not None}

    def _signs_on(self, device: torch.device) -> Tensor:
        if self._signs.device != device:
            self._signs = self._signs.to(device)
        return self._signs


def numbers_of(pairs: Mapping[str, Tensor]) -> Sketch:
    """What `of_all` gave, with one wait for the device."""
    rows = torch.stack(list(pairs.values())).tolist() if pairs else []
    return {key: (product, norm) for key, (product, norm) in zip(pairs, rows, strict=True)}


def clear_gradients(parameters: Mapping[str, Tensor]) -> None:
    """As at the beginning of a step."""
    for parameter in parameters.values():
        parameter.grad = None


class Cheating:
    """A worker that contributes what it did not compute, on purpose, for tests."""

    def __init__(self, cheat: Cheat, rank: int) -> None:
        self._how, self._first = cheat, cheat.step
        self._on = cheat.rank == rank
        self._kept: dict[int, Tensor] = {}
        self.step = 0

    def touch(self, parameters: Iterable[Tensor]) -> None:
        """Make of the gradients what the others get."""
        for parameter in parameters if self._on else ():
            if parameter.grad is None:
                continue
            kept = self._kept.setdefault(id(parameter), parameter.grad.clone())
            if self.step < self._first:
                continue
            if self._how.how == STALE:
                parameter.grad.copy_(kept)
            else:
                parameter.grad.mul_(self._how.factor)


class LocalGradients:
    """What a rank itself has computed in a step, seen before it travels to the other replicas.

    Args:
        names: "stage/name" of each parameter, by its identity.
        cheat: what is done to gradients on purpose before anybody sees them; by default nothing.
    """

    def __init__(self, sketcher: Sketcher, names: Mapping[int, str], cheat: Cheating | None = None) -> None:
        self._sketcher = sketcher
        self._cheat = cheat
        self._names = names
        self.wanted = False
        self.found: dict[str, Tensor] = {}

    def begin(self, step: int, *, wanted: bool) -> None:
        """Step number `step` begins, of which a sketch is `wanted` or not."""
        self.wanted, self.found = wanted, {}
        if self._cheat is not None:
            self._cheat.step = step

    def taken(self) -> Sketch | None:
        """Of this step; None where none was wanted."""
        return numbers_of(self.found) if self.wanted else None

    def see(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of these are complete."""
        if self._cheat is not None:
            parameters = list(parameters)
            self._cheat.touch(parameters)
        if self.wanted:
            named = ((self._names[id(parameter)], parameter) for parameter in parameters)
            self.found.update(self._sketcher.of_all(named))
