"""What a rank tells the driver of itself, so that the warm-up of the pipeline can be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distensor.core.pipeline_simulation import LinkSeconds
from distensor.core.warm_up import RankFigures
from distensor.node.link_probe import Neighbours, measure_links

if TYPE_CHECKING:
    from distensor.core import Clock
    from distensor.node.pipeline import Totals
    from distensor.transport import DataPlane

WEIGHT_COPIES = 4
"""Weights, gradients and two optimizer states."""


def rank_figures(
    totals: Totals,
    *,
    micro_batches: int,
    links: Mapping[int, LinkSeconds],
    neighbours: Neighbours,
    memory_limit: int | None,
    weight_bytes: int,
) -> RankFigures | None:
    """None: nothing was run, so nothing is known."""
    if micro_batches == 0:
        return None
    return RankFigures(
        forward=totals.forward_seconds / micro_batches,
        backward=totals.backward_seconds / micro_batches,
        before=None if neighbours.before is None else links[neighbours.before],
        after=None if neighbours.after is None else links[neighbours.after],
        most_in_flight=most_in_flight(totals.held_bytes, memory_limit, weight_bytes),
    )


def measured_figures(
    totals: Totals,
    *,
    plane: DataPlane,
    clock: Clock,
    sequence: int,
    neighbours: Neighbours,
    micro_batches: int,
    memory_limit: int | None,
    weight_bytes: int,
) -> RankFigures | None:
    """`rank_figures`, with the links measured now: nothing else may be on its way."""
    sizes = totals.message_bytes
    links = measure_links(plane=plane, neighbours=neighbours, sizes=sizes, sequence=sequence, clock=clock)
    return rank_figures(
        totals,
        micro_batches=micro_batches,
        links=links,
        neighbours=neighbours,
        memory_limit=memory_limit,
        weight_bytes=weight_bytes,
    )


def most_in_flight(held_bytes: int, memory_limit: int | None, weight_bytes: int) -> int | None:
    """For how many micro-batches there is memory; None: for any number."""
    if memory_limit is None or held_bytes == 0:
        return None
    return max(1, (memory_limit - WEIGHT_COPIES * weight_bytes) // held_bytes)
