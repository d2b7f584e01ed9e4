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
    """Of one step. Where replicas keep their own gradients, each has a weight and a norm of its own.

    weights: the numbers of elements that the losses are means over, of each place.
    norms: of the mean gradient of each place; nan for a place without elements.
    """

    loss: float
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    place: int

    @property
    def weight(self) -> float:
        return math.fsum(self.weights)

    @property
    def grad_norm(self) -> float:
        """The norm of the mean gradient; of several, their mean."""
        known = [norm for norm, weight in zip(self.norms, self.weights, strict=True) if weight > 0]
        return math.fsum(known) / len(known) if known and all(map(math.isfinite, known)) else math.nan

    def scale(self, clip_norm: float | None) -> float:
        """What makes of this place's sums of gradients the clipped mean. Sums of no elements are zero and stay so."""
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
    values = torch.zeros(1 + 2 * places, dtype=torch.float64)
    values[0], values[1 + place], values[1 + places + place] = own[0], own[1], own_norm
    if world is not None:
        most = values[1 + places :].clone()
        all_reduce_at_once(world, values, Reduction.SUM)
        if kind is NormType.INF:
            all_reduce_at_once(world, most, Reduction.MAX)
            values[1 + places :] = most
    loss_sum, *rest = values.tolist()
    weights, parts = tuple(rest[:places]), rest[places:]
    weight = math.fsum(weights)
    norms = (
        whole_norm(part, kind) / own_weight if own_weight > 0 else math.nan
        for part, own_weight in zip(parts, weights, strict=True)
    )
    return WorldSums(
        loss=loss_sum / weight if weight > 0 else math.nan, weights=weights, norms=tuple(norms), place=place
    )
