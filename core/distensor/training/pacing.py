"""Choosing the warm-up of 1F1B from what the ranks measure in the first steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from distensor.core import ParallelConfig, RankLayout
from distensor.core.pipeline_bubble import predicted_bubble
from distensor.core.pipeline_simulation import LinkSeconds, StageSeconds
from distensor.core.schedules import Schedule, takes_warm_up
from distensor.core.warm_up import Border, RankFigures, WarmUp, choose_warm_up

logger = logging.getLogger(__name__)

UNMEASURED_STEPS = 1
"""The first step prepares memory and kernels; its times say nothing about the others."""
MEASURED_STEPS = 3
AGAIN_AFTER = 200
"""Steps from one choice to the next measurement: a home's line is another one in the evening."""


class PipelinePacer:
    """What to tell the ranks of each step, and the choice once enough was measured.

    Every replica runs the same warm-up: that of the slowest stage and link at each place.
    """

    def __init__(self, *, parallel: ParallelConfig, schedule: Schedule, stages: int) -> None:
        ranks = parallel.pipeline_parallel
        self._layout = RankLayout(parallel)
        self._ranks = ranks
        self._schedule = schedule
        self._stages = stages
        self._adapts = self._open = ranks > 1 and takes_warm_up(schedule, ranks=ranks, stages=stages)
        self._steps = self._since = 0
        self._measured: list[Mapping[int, RankFigures]] = []
        self.figures: dict[int, RankFigures] = {}
        """What each rank measured last, typical of the steps; empty until that is done."""
        self.rounds = 0
        """How often they have measured."""
        self.choice: WarmUp | None = None

    @property
    def depths(self) -> tuple[int, ...]:
        """Forwards ahead on each rank; empty while the schedule's own are used."""
        return () if self.choice is None else self.choice.depths

    def order(self) -> dict[str, Any]:
        """Words of the `step` command."""
        return {
            "warm_up": list(self.depths) or None,
            "measure": self._open and self._steps >= UNMEASURED_STEPS,
        }

    def observe(self, figures: Mapping[int, RankFigures | None], micro_batches: int) -> None:
        """A step is done; `figures` by rank, `micro_batches` of a replica."""
        self._steps += 1
        if self._steps == 1 and self._ranks > 1:
            self._say_bubble(micro_batches)
        known = {rank: found for rank, found in figures.items() if found is not None}
        if not self._open:
            self._since += 1
            self._open = self._adapts and self._since >= AGAIN_AFTER
        elif known:
            self._measured.append(known)
        if len(self._measured) == MEASURED_STEPS:
            self._open, self._since = False, 0
            self._conclude(micro_batches)
            self._measured = []

    def _conclude(self, micro_batches: int) -> None:
        ranks = sorted({rank for step in self._measured for rank in step})
        self.figures = {rank: _typical([step[rank] for step in self._measured if rank in step]) for rank in ranks}
        self.rounds += 1
        self._choose(micro_batches)

    def _say_bubble(self, micro_batches: int) -> None:
        bubble = predicted_bubble(self._schedule, ranks=self._ranks, stages=self._stages, micro_batches=micro_batches)
        logger.log(
            logging.WARNING if micro_batches < self._ranks else logging.INFO,
            "schedule=%s with %d micro-batches over %d ranks: ranks of equal speed wait %.0f %% of a step",
            self._schedule, micro_batches, self._ranks, 100 * bubble,
        )  # fmt: skip

    def _choose(self, micro_batches: int) -> None:
        places = [self._of_place(place) for place in range(self._ranks)]
        if not all(places):
            return
        before = self.depths
        self.choice = choose_warm_up(
            seconds=[_stage_seconds(found) for found in places],
            borders=[
                Border(down=_slowest([each.after for each in upper]), up=_slowest([each.before for each in lower]))
                for upper, lower in itertools.pairwise(places)
            ],
            micro_batches=micro_batches,
            most_in_flight=[_least([each.most_in_flight for each in found]) for found in places],
        )
        if self.depths != before:
            logger.info("%s", self.choice)

    def _of_place(self, place: int) -> list[RankFigures]:
        """One for each rank at that place of a pipeline: what is typical of the steps."""
        return [found for rank, found in self.figures.items() if self._layout.coordinates(rank).pp == place]


def _typical(found: Sequence[RankFigures]) -> RankFigures:
    """The median of the steps: one of them may have waited for something else on its machine."""
    return RankFigures(
        forward=median(each.forward for each in found),
        backward=median(each.backward for each in found),
        before=_typical_link([each.before for each in found]),
        after=_typical_link([each.after for each in found]),
        most_in_flight=_least([each.most_in_flight for each in found]),
    )


def _typical_link(found: Sequence[LinkSeconds | None]) -> LinkSeconds | None:
    known = [link for link in found if link is not None]
    if not known:
        return None
    return LinkSeconds(latency=median(link.latency for link in known), occupied=median(link.occupied for link in known))


def _stage_seconds(found: Sequence[RankFigures]) -> StageSeconds:
    half = max(each.backward for each in found) / 2
    return StageSeconds(forward=max(each.forward for each in found), input_gradient=half, weight_gradient=half)


def _slowest(found: Sequence[LinkSeconds | None]) -> LinkSeconds:
    """Of the same border in several replicas. A link that nobody reports takes no time."""
    return max((link for link in found if link is not None), key=lambda link: link.total, default=LinkSeconds())


def _least(found: Sequence[int | None]) -> int | None:
    return min((most for most in found if most is not None), default=None)
