"""The process groups of one rank: of the whole mesh, of the gradients, and of the axes that programs talk along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch.distributed as dist

from distensor.core import SYSTEM_CLOCK, Axis, Clock, RankLayout
from distensor.node.axes import ProcessGroupAxis

NewGroup: TypeAlias = Callable[[list[int]], Any]
"""Makes a group of ranks. Every rank of the mesh calls it for every group, in the same order; what it returns to a
rank that is no member does not matter."""

GRADIENT_AXES = (Axis.DP, Axis.CP)
"""Ranks that differ only here hold the same weights and see other rows or other parts of the sequence, so their
gradients add up."""

PROGRAM_AXES = (Axis.TP, Axis.CP)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshGroups:
    """None, or absent, where the rank would be alone.

    gradients: of dp and cp. replicas: of dp alone, and context: of cp alone, for replicas that keep their gradients.
    """

    world: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    axes: Mapping[Axis, ProcessGroupAxis] = field(default_factory=dict)

    @property
    def axis_seconds(self) -> float:
        """How long this rank has been in collectives of its programs so far."""
        return sum(axis.seconds for axis in self.axes.values())

    def going_on_as(self, later: MeshGroups) -> MeshGroups:
        """`later`, the groups of another epoch, behind the axes of these: programs that were built keep theirs."""
        for name, axis in self.axes.items():
            axis.bind(later.axes[name].group)
        return replace(later, axes=self.axes or later.axes)


NO_GROUPS = MeshGroups()


def make_groups(layout: RankLayout, rank: int, new_group: NewGroup, clock: Clock = SYSTEM_CLOCK) -> MeshGroups:
    """All groups of `rank`; the order in which they are made is the same on every rank."""
    axes = {axis: _own(layout, rank, new_group, axis) for axis in PROGRAM_AXES}
    gradients = _own(layout, rank, new_group, *GRADIENT_AXES)
    # Beside the programs' own group of cp, since gradients are summed while programs talk.
    replicas, context = (_part(layout, rank, new_group, axis, gradients) for axis in GRADIENT_AXES)
    return MeshGroups(
        gradients=gradients,
        replicas=replicas,
        context=context,
        axes={axis: ProcessGroupAxis(group, clock) for axis, group in axes.items() if group is not None},
        world=_own(layout, rank, new_group, *Axis),
    )


def _part(
    layout: RankLayout, rank: int, new_group: NewGroup, axis: Axis, gradients: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The group of one gradient axis: that of both where the other one has one rank."""
    sizes = {other: len(layout.group_of(rank, other)) for other in GRADIENT_AXES}
    if sizes[axis] == 1:
        return None
    return gradients if min(sizes.values()) == 1 else _own(layout, rank, new_group, axis)


def torch_groups(layout: RankLayout, rank: int, clock: Clock) -> MeshGroups:
    """The groups over torch.distributed, which must be initialised where there is more than one rank."""
    return make_groups(layout, rank, lambda ranks: dist.new_group(ranks, backend="distensor"), clock)


def _own(layout: RankLayout, rank: int, new_group: NewGroup, *axes: Axis) -> dist.ProcessGroup | None:
    mine = None
    for ranks in layout.groups(*axes):
        if len(ranks) > 1:
            made = new_group([int(member) for member in ranks])
            mine = made if rank in ranks else mine
    return mine
