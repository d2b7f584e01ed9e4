"""What the ranks of a job measured, as figures of the nodes that they ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distensor.core import Axis, RankLayout
from distensor.core.control import MeasuredWay, MeshMeasures, Topology
from distensor.core.warm_up import RankFigures
from distensor.training.counting import STEP_OVER_FORWARD, count

if TYPE_CHECKING:
    from distensor.core.pipeline_simulation import LinkSeconds
    from distensor.training.pieces import MeshPieces
    from distensor.training.replies import LinkBytes


def mesh_measures(
    pieces: MeshPieces, topology: Topology, figures: Mapping[int, RankFigures], rows: int
) -> MeshMeasures:
    """`figures` by rank, for micro-batches of `rows` rows. Of several links between two nodes the slowest counts."""
    nodes = {int(member.rank): member.node_name for member in topology.members}
    links: dict[tuple[str, str], LinkSeconds] = {}
    speeds: dict[str, list[float]] = {}
    operations: dict[tuple[int, int, int], int] = {}
    for rank, found in figures.items():
        for peer, link in _neighbours(pieces, rank, found).items():
            ends = nodes[rank], nodes[peer]
            if ends not in links or link.total > links[ends].total:
                links[ends] = link
        place, seconds = pieces.place(rank), found.forward + found.backward
        alike = place.pp, place.tp, place.cp  # replicas run the same
        if alike not in operations:
            operations[alike] = _operations(pieces, rank, rows)
        if seconds > 0:
            speeds.setdefault(nodes[rank], []).append(operations[alike] / seconds)
    return MeshMeasures(links=links, speed={node: sum(each) / len(each) for node, each in speeds.items()})


def measured_ways(topology: Topology, links: Mapping[int, Sequence[LinkBytes]]) -> dict[tuple[str, str], MeasuredWay]:
    """What the ranks told of their `links` in a step, by nodes: rates by the end that received, the rest by either.

    Of several connections between two nodes the one with the longest round trip counts.
    """
    nodes = {int(member.rank): member.node_name for member in topology.members}
    rates = {(link.peer, rank): link.line_rate for rank, told in links.items() for link in told}
    ways: dict[tuple[str, str], MeasuredWay] = {}
    for rank, told in links.items():
        for link in told:
            ends = nodes[rank], nodes.get(link.peer, "")
            if not link.path or not ends[1] or ends[0] == ends[1]:
                continue
            way = MeasuredWay(
                path=link.path,
                rate=rates.get((rank, link.peer)),
                rtt=None if link.rtt_ms is None else link.rtt_ms / 1e3,
                age=link.rtt_age_s,
            )
            if ends not in ways or (way.rtt or 0.0) > (ways[ends].rtt or 0.0):
                ways[ends] = way
    return dict(sorted(ways.items()))


def _neighbours(pieces: MeshPieces, rank: int, found: RankFigures) -> dict[int, LinkSeconds]:
    """The links of a rank, by the rank at the other end."""
    pipeline = [int(member) for member in RankLayout(pieces.parallel).group_of(rank, Axis.PP)]
    at = pipeline.index(rank)
    links = {at - 1: found.before, at + 1: found.after}
    return {pipeline[index]: link for index, link in links.items() if link is not None}


def _operations(pieces: MeshPieces, rank: int, rows: int) -> int:
    """Floating-point operations of one micro-batch, forward and backward."""
    return STEP_OVER_FORWARD * sum(count(program, rows).flops for program in pieces.programs_of(rank).values())
