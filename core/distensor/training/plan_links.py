"""What a pipeline would take over links and at speeds that ranks of this session have measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from distensor.core.actions import Action
from distensor.core.control import Mesh
from distensor.core.pipeline_simulation import LinkSeconds, StageSeconds, simulate
from distensor.core.reading import Reading, Unavailable
from distensor.core.schedules import Schedule, rank_of_stage, takes_warm_up
from distensor.core.warm_up import Border, choose_warm_up


@dataclass(frozen=True, kw_only=True, slots=True)
class OverLinks:
    """A step's pipeline over the slowest measured link and at the slowest measured speed, in seconds.

    Where a rank will be is not known before a job has begun: the slowest pair of nodes stands for each border.
    """

    seconds: float
    nodes: tuple[str, str]
    """Those of the slowest link."""
    link: LinkSeconds
    speed: float
    """Floating-point operations a second of the slowest rank."""
    warm_up: tuple[int, ...]
    """Forwards ahead that 1F1B would choose; empty for schedules that do not adapt."""

    def __str__(self) -> str:
        ahead = f", warm-up {'-'.join(map(str, self.warm_up))}" if self.warm_up else ""
        return (
            f"over measured links: about {self.seconds:.3g} s a step{ahead} (slowest link {self.nodes[0]} to "
            f"{self.nodes[1]}, {self.link.latency * 1e3:.1f} ms and {self.link.occupied * 1e3:.1f} ms busy with a "
            "message of the job that measured it)"
        )


def over_links(
    mesh: Reading[Mesh],
    *,
    schedule: Schedule,
    lists: Sequence[Sequence[Action]],
    flops: Sequence[int],
    micro_batches: int,
) -> OverLinks | None:
    """None where nothing is measured, or nothing travels.

    Args:
        lists: actions of each rank of one pipeline.
        flops: floating-point operations of a forward, for each stage; a backward has twice as many.
    """
    ranks = len(lists)
    if ranks == 1 or isinstance(mesh, Unavailable):
        return None
    links, speeds = mesh.links, mesh.measured_speed
    if isinstance(links, Unavailable) or isinstance(speeds, Unavailable):
        return None
    nodes, link = max(links.items(), key=lambda item: item[1].total)
    speed = min(speeds.values())
    seconds = [_stage(count / speed) for count in flops]
    if takes_warm_up(schedule, ranks=ranks, stages=len(flops)):
        borders = [Border(down=link, up=link)] * (ranks - 1)
        choice = choose_warm_up(seconds=seconds, borders=borders, micro_batches=micro_batches)
        return OverLinks(seconds=choice.seconds, nodes=nodes, link=link, speed=speed, warm_up=choice.depths)
    run = simulate(
        lists,
        seconds=seconds,
        place=partial(rank_of_stage, schedule, ranks=ranks),
        links={(one, other): link for one in range(ranks) for other in range(ranks) if one != other},
    )
    return OverLinks(seconds=run.makespan, nodes=nodes, link=link, speed=speed, warm_up=())


def _stage(forward: float) -> StageSeconds:
    return StageSeconds(forward=forward, input_gradient=forward, weight_gradient=forward)
