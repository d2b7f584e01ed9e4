"""Which ranks go on as which when the members of a job change. Pure.

Replicas hold the same, so a replica may be put together from ranks of several: for each place (tp, pp, cp) any rank
that is at that place will do. Whole replicas are kept together where there are any.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from distensor.core.ids import Rank
from distensor.core.parallel import Coordinates, ParallelConfig, RankLayout

Place: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouping:
    """A membership made from another one: for each new rank the old rank that goes on as it, None for a new worker."""

    parallel: ParallelConfig
    continues: tuple[Rank | None, ...]

    @property
    def new(self) -> tuple[Rank, ...]:
        return tuple(Rank(rank) for rank, before in enumerate(self.continues) if before is None)


def renumbered(regrouping: Regrouping, continues: Sequence[Rank | None]) -> Regrouping:
    """The same membership made from an epoch in between, whose rank i went on from the old rank `continues[i]`.

    >>> wanted = Regrouping(parallel=ParallelConfig(data_parallel=2), continues=(Rank(2), None))
    >>> renumbered(wanted, (None, Rank(2))).continues
    (1, None)
    """
    between = {before: Rank(rank) for rank, before in enumerate(continues) if before is not None}
    return replace(
        regrouping, continues=tuple(None if old is None else between.get(old) for old in regrouping.continues)
    )


def without_lost(parallel: ParallelConfig, alive: Collection[int]) -> Regrouping | None:
    """As many replicas as the ranks that are `alive` make up; None where some place of the mesh has nobody left.

    >>> without_lost(ParallelConfig(data_parallel=3), {0, 2}).continues
    (0, 2)
    """
    layout = RankLayout(parallel)
    left: dict[Place, list[Rank]] = {}
    for replica in _by_wholeness(layout, alive):
        for rank in replica:
            if rank in alive:
                left.setdefault(place_of(layout.coordinates(rank)), []).append(rank)
    places = parallel.world_size // parallel.data_parallel
    if len(left) < places:
        return None
    replicas = min(len(ranks) for ranks in left.values())
    return _filled(replace(parallel, data_parallel=replicas), left)


def with_replaced(parallel: ParallelConfig, alive: Collection[int]) -> Regrouping:
    """The same mesh, with a new worker for each rank that is not `alive`.

    >>> with_replaced(ParallelConfig(pipeline_parallel=2), {1}).continues
    (None, 1)
    """
    ranks = (Rank(rank) for rank in range(parallel.world_size))
    return Regrouping(parallel=parallel, continues=tuple(rank if rank in alive else None for rank in ranks))


def with_replicas(parallel: ParallelConfig, replicas: int) -> Regrouping:
    """The same ranks and further replicas of new workers, `replicas` in all.

    >>> with_replicas(ParallelConfig(data_parallel=1, pipeline_parallel=2), 2).continues
    (0, 1, None, None)
    """
    layout = RankLayout(parallel)
    left: dict[Place, list[Rank]] = {}
    for rank in sorted(range(parallel.world_size), key=lambda rank: layout.coordinates(rank).dp):
        left.setdefault(place_of(layout.coordinates(rank)), []).append(Rank(rank))
    return _filled(replace(parallel, data_parallel=replicas), left)


def place_of(coordinates: Coordinates) -> Place:
    """Where a rank is inside its replica: ranks of the same place hold the same."""
    return coordinates.tp, coordinates.pp, coordinates.cp


def _by_wholeness(layout: RankLayout, alive: Collection[int]) -> list[list[Rank]]:
    """The replicas, those first of which every rank is alive."""
    replicas: dict[int, list[Rank]] = {}
    for rank in range(layout.config.world_size):
        replicas.setdefault(layout.coordinates(rank).dp, []).append(Rank(rank))
    return sorted(replicas.values(), key=lambda ranks: not all(rank in alive for rank in ranks))


def _filled(parallel: ParallelConfig, left: dict[Place, list[Rank]]) -> Regrouping:
    layout = RankLayout(parallel)
    continues: list[Rank | None] = []
    for rank in range(parallel.world_size):
        coordinates = layout.coordinates(rank)
        known = left[place_of(coordinates)]
        continues.append(known[coordinates.dp] if coordinates.dp < len(known) else None)
    return Regrouping(parallel=parallel, continues=tuple(continues))
