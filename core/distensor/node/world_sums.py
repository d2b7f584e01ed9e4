"""What all ranks of a mesh add up at the end of a step: loss, weights and norms, in one message."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distensor.node.axes import all_reduce_at_once
from distensor.optim.clipping import NormType, clip_factor, whole_norm
from distensor.program.axes import Reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSums:
    """Of one step. Where replicas keep their own gradients, each is a place with a loss, weight and norm of its own,
    and one whose loss or norm is no finite number is left out of the step while another one is.

    losses: the sums of loss times weight of each place.
    weights: the numbers of elements that the losses are means over, of each place.
    norms: of the mean gradient of each place; nan for a place without elements.
    """

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    place: int

    @property
    def dropped(self) -> tuple[int, ...]:
        """The places with elements that have no finite loss and norm, where others have."""
        bad = tuple(place for place, weight in enumerate(self.weights) if weight > 0 and not self._is_finite(place))
        return bad if len(bad) < sum(weight > 0 for weight in self.weights) else ()

    def _is_finite(self, place: int) -> bool:
        return math.isfinite(self.losses[place]) and math.isfinite(self.norms[place])

    @property
    def _used(self) -> list[int]:
        dropped = self.dropped
        return [place for place, weight in enumerate(self.weights) if weight > 0 and place not in dropped]

    @property
    def weight(self) -> float:
        return math.fsum(self.weights[place] for place in self._used)

    @property
    def loss(self) -> float:
        """The mean; nan without elements."""
        weight = self.weight
        return sum(self.losses[place] for place in self._used) / weight if weight > 0 else math.nan

    @property
    def grad_norm(self) -> float:
        """The norm of the mean gradient; of several, their mean."""
        known = [self.norms[place] for place in self._used]
        return math.fsum(known) / len(known) if known and all(map(math.isfinite, known)) else math.nan

    def scale(self, clip_norm: float | None) -> float:
        """What makes of this place's sums of gradients the clipped mean. Sums of no elements are zero and stay so; of
        a place that is left out, nan: no rank of it has anything to send then."""
        if self.place in self.dropped:
            return math.nan
        weight = self.weights[self.place]
        return clip_factor(self.norms[self.place], clip_norm) / weight if weight > 0 else 1.0


def sum_over_world(
    world: dist.ProcessGroup | None,
    own: tuple[float, float],
    own_norm: float,
    *,
    kind: NormType,
    place: int,
    places: int,
) -> WorldSums:
    """Add up over all ranks of `world` (None: this rank is alone); all of them call it with the same `places`.

    Args:
        own: (loss times weight, weight) of this rank.
        own_norm: this rank's part of the norm of its place's sums of gradients.
    """
    values = torch.zeros(3, places, dtype=torch.float64)
    values[0, place], values[1, place], values[2, place] = own[0], own[1], own_norm
    if world is not None:
        most = values[2].clone()
        all_reduce_at_once(world, values, Reduction.SUM)
        if kind is NormType.INF:
            all_reduce_at_once(world, most, Reduction.MAX)
            values[2] = most
    losses, weights, parts = values.tolist()
    norms = (
        whole_norm(part, kind) / weight if weight > 0 else math.nan for part, weight in zip(parts, weights, strict=True)
    )
    return WorldSums(losses=tuple(losses), weights=tuple(weights), norms=tuple(norms), place=place)
