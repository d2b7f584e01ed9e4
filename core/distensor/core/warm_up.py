"""How many forwards each rank of a 1F1B pipeline runs ahead, so that slow links are covered and memory suffices.

Plain 1F1B runs a rank's distance to the end ahead, which covers the compute of the ranks behind it and no link time. A
rank that holds n micro-batches gets one back every (round trip)/n: to have one every period it needs
ceil(round trip / period) of them. Depths between the two are tried in the event simulation, and the smallest that
is nearly as fast as the best is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distensor.core.errors import ConfigError
from distensor.core.pipeline_simulation import LinkSeconds, StageSeconds, ideal_seconds, simulate
from distensor.core.schedule_orders import one_f_one_b, plain_warm_up

MULTIPLES = (2, 3)
"""Of plain 1F1B's depth, for links that are slower than every stage."""
GOOD_ENOUGH = 1.02
"""A depth whose predicted time is within this of the best is deep enough."""
SHARES = (0.5, 1.0, 1.5, 2.0)
"""Of what the round trips ask for beyond plain 1F1B: unequal parts lose some of it to waiting."""
ROUNDING = 1e-9
SIMULATED_MICRO_BATCHES = 64
"""Beyond so many a step only repeats its steady part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """The link between two neighbouring ranks: activations go down, gradients come up."""

    down: LinkSeconds
    up: LinkSeconds

    @property
    def slowest(self) -> float:
        return max(self.down.occupied, self.up.occupied)

    @property
    def round_trip(self) -> float:
        return self.down.total + self.up.total


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What a rank has measured of itself and of what it sends to its neighbours: seconds of one micro-batch.

    `most_in_flight` is the number of micro-batches that its memory holds; None: any number.
    """

    forward: float
    backward: float
    before: LinkSeconds | None
    after: LinkSeconds | None
    most_in_flight: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """The forwards that each rank runs ahead; seconds of a step: predicted, with plain 1F1B, and at the very best."""

    depths: tuple[int, ...]
    seconds: float
    plain_seconds: float
    ideal_seconds: float

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches whose activations each rank holds at once."""
        return tuple(depth + 1 for depth in self.depths)

    @property
    def is_plain(self) -> bool:
        return self.depths == plain_depths(len(self.depths))

    def __str__(self) -> str:
        return (
            f"1F1B warm-up {'-'.join(map(str, self.depths))}: {self.seconds:.3g} s a step predicted, "
            f"{self.plain_seconds:.3g} s with {'-'.join(map(str, plain_depths(len(self.depths))))}, "
            f"{self.ideal_seconds:.3g} s at the very best"
        )


def plain_depths(ranks: int) -> tuple[int, ...]:
    return tuple(plain_warm_up(rank, ranks) for rank in range(ranks))


def choose_warm_up(
    *,
    seconds: Sequence[StageSeconds],
    borders: Sequence[Border],
    micro_batches: int,
    most_in_flight: Sequence[int | None] | None = None,
) -> WarmUp:
    """The warm-up of each rank.

    Args:
        seconds: for each rank, which holds one stage.
        borders: between each rank and the next.
        most_in_flight: for how many micro-batches each rank has memory; None: for any number. Plain 1F1B's depth is
            the least that is ever chosen: whether that fits is another question.

    Raises:
        ConfigError: not one border between each two ranks.
    """
    ranks = len(seconds)
    if len(borders) != ranks - 1:
        raise ConfigError(f"{len(borders)} borders between {ranks} ranks; expected {ranks - 1}")
    plain = plain_depths(ranks)
    micro = min(micro_batches, SIMULATED_MICRO_BATCHES)
    candidates = list(_candidates(plain, needed_depths(seconds, borders), micro))
    tried = dict.fromkeys(_within(depths, plain, most_in_flight or [None] * ranks) for depths in candidates)
    times = {depths: _simulated(depths, seconds, borders, micro) for depths in tried}
    best = min(times.values())
    chosen = min((depths for depths, time in times.items() if time <= GOOD_ENOUGH * best), key=sum)
    rest = micro_batches / micro if micro else 1.0  # a step longer than what was simulated repeats its steady part
    return WarmUp(
        depths=chosen,
        seconds=times[chosen] * rest,
        plain_seconds=times[plain] * rest,
        ideal_seconds=ideal_of(seconds, borders, micro_batches),
    )


def needed_depths(seconds: Sequence[StageSeconds], borders: Sequence[Border]) -> list[int]:
    """ceil(round trip / period) - 1 for each rank, where the period is that of the slowest stage or link."""
    period = max([stage.period for stage in seconds] + [border.slowest for border in borders])
    if period <= 0:
        return list(plain_depths(len(seconds)))
    trips = [
        sum(stage.period for stage in seconds[rank:]) + sum(border.round_trip for border in borders[rank:])
        for rank in range(len(seconds))
    ]
    return [math.ceil(trip / period - ROUNDING) - 1 for trip in trips]


def ideal_of(seconds: Sequence[StageSeconds], borders: Sequence[Border], micro_batches: int) -> float:
    """The links-as-stages bound of these ranks; see `ideal_seconds`."""
    links = [link for border in borders for link in (border.down, border.up)]
    return ideal_seconds(seconds, links, micro_batches)


def _candidates(plain: Sequence[int], needed: Sequence[int], micro_batches: int) -> Iterator[list[int]]:
    yield list(plain)
    for share in SHARES:
        for more in (0, 1):
            yield [
                base + max(0, math.ceil(share * (need - base))) + (more if base else 0)
                for base, need in zip(plain, needed, strict=True)
            ]
    for times in MULTIPLES:
        yield [times * base for base in plain]
    yield [max(base, micro_batches) for base in plain]


def _within(depths: Sequence[int], plain: Sequence[int], room: Sequence[int | None]) -> tuple[int, ...]:
    """No more than there is memory for, no less than plain 1F1B, and no rank further ahead than the one before it."""
    falling = [max(depths[rank:]) for rank in range(len(depths))]
    found: list[int] = []
    for depth, least, most in zip(falling, plain, room, strict=True):
        allowed = depth if most is None else min(depth, most - 1)
        found.append(max(least, min([allowed, *found[-1:]])))
    return tuple(found)


def _simulated(
    depths: Sequence[int], seconds: Sequence[StageSeconds], borders: Sequence[Border], micro_batches: int
) -> float:
    links = {(rank, rank + 1): border.down for rank, border in enumerate(borders)}
    links |= {(rank + 1, rank): border.up for rank, border in enumerate(borders)}
    lists = [one_f_one_b(rank, micro_batches, depth) for rank, depth in enumerate(depths)]
    return simulate(lists, seconds=seconds, place=lambda stage: stage, links=links).makespan
