"""What a pipeline's action lists take, computed: an event simulation, without clock and without network.

The rules: every rank runs its list in order; an action starts when its rank is free and its input has arrived. A
message occupies its direction of a link for `occupied` seconds, one after the other, and arrives `latency` later; the
sender never waits for it. Stages of the same rank hand over at once.

Lists in, numbers out: the same function predicts, chooses a warm-up and checks a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distensor.core.actions import Action, Phase, peak_in_flight
from distensor.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """What one micro-batch takes on one stage."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def period(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient

    def of(self, phase: Phase) -> float:
        return {
            Phase.FORWARD: self.forward,
            Phase.BACKWARD: self.input_gradient + self.weight_gradient,
            Phase.INPUT_GRADIENT: self.input_gradient,
            Phase.WEIGHT_GRADIENT: self.weight_gradient,
        }[phase]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSeconds:
    """What one message takes in one direction of a link."""

    latency: float = 0.0
    occupied: float = 0.0

    @property
    def total(self) -> float:
        return self.latency + self.occupied


Links = Mapping[tuple[int, int], LinkSeconds]
"""By (from rank, to rank); a link that is not there takes no time."""

NO_TIME = LinkSeconds()


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """`busy` and `in_flight` are for each rank: seconds of work, and the most forwards held at once."""

    makespan: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def mean_idle(self) -> float:
        """The part of the time in which a rank waits, all ranks together: the bubble."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan > 0 else 0.0


def simulate(
    lists: Sequence[Sequence[Action]],
    *,
    seconds: Sequence[StageSeconds],
    place: Callable[[int], int],
    links: Links | None = None,
    link_per_border: bool = False,
) -> Simulation:
    """Run the action list of every rank.

    Args:
        seconds: for each stage.
        place: the rank of a stage.
        link_per_border: whether two ranks have a link of its own for each border between stages of theirs, instead
            of one for all.

    Raises:
        ConfigError: the lists wait for each other for ever.
    """
    run = _Run(seconds=seconds, place=place, links=links or {}, per_border=link_per_border, ranks=[0.0] * len(lists))
    waiting = [list(reversed(actions)) for actions in lists]
    while any(waiting):
        moved = [run.advance(rank, queue) for rank, queue in enumerate(waiting)]
        if not any(moved):
            stuck = ", ".join(f"rank {rank} before {queue[-1]}" for rank, queue in enumerate(waiting) if queue)
            raise ConfigError(f"these action lists wait for each other for ever: {stuck}")
    return Simulation(
        makespan=max(run.ranks, default=0.0),
        busy=tuple(sum(seconds[action.stage].of(action.phase) for action in actions) for actions in lists),
        in_flight=tuple(map(peak_in_flight, lists)),
    )


@dataclass(kw_only=True, slots=True)
class _Run:
    """When each rank and direction is free, and when each (gradient?, stage, micro-batch) is there."""

    seconds: Sequence[StageSeconds]
    place: Callable[[int], int]
    links: Links
    per_border: bool
    ranks: list[float]
    directions: dict[tuple[int, ...], float] = field(default_factory=dict)
    arrived: dict[tuple[bool, int, int], float] = field(default_factory=dict)

    def advance(self, rank: int, queue: list[Action]) -> bool:
        """Run what can run on one rank; False if nothing could."""
        before = len(queue)
        while queue and (ready := self._input_time(queue[-1])) is not None:
            action = queue.pop()
            self.ranks[rank] = max(self.ranks[rank], ready) + self.seconds[action.stage].of(action.phase)
            self._hand_over(rank, action)
        return len(queue) < before

    def _input_time(self, action: Action) -> float | None:
        """When the input of an action is there; None: not known yet."""
        gradient = action.phase is not Phase.FORWARD
        first = len(self.seconds) - 1 if gradient else 0
        if action.phase is Phase.WEIGHT_GRADIENT or action.stage == first:
            return 0.0
        return self.arrived.get((gradient, action.stage, action.micro_batch))

    def _hand_over(self, rank: int, action: Action) -> None:
        """Send what the action made to the stage that waits for it."""
        gradient = action.phase is not Phase.FORWARD
        stage = action.stage - 1 if gradient else action.stage + 1
        if action.phase is Phase.WEIGHT_GRADIENT or not 0 <= stage < len(self.seconds):
            return
        now, peer = self.ranks[rank], self.place(stage)
        if peer != rank:
            link = self.links.get((rank, peer), NO_TIME)
            direction = (rank, peer, action.stage, stage) if self.per_border else (rank, peer)
            self.directions[direction] = max(now, self.directions.get(direction, 0.0)) + link.occupied
            now = self.directions[direction] + link.latency
        self.arrived[gradient, stage, action.micro_batch] = now


def ideal_seconds(seconds: Sequence[StageSeconds], links: Sequence[LinkSeconds], micro_batches: int) -> float:
    """The links-as-stages bound: the first micro-batch there and back, then one for each period of the slowest part.

    `links` are all directions between neighbouring stages, each taken once. With equal stages and no links it is
    (M + P - 1) periods, so that (P - 1) / (M + P - 1) of the time is bubble.
    """
    slowest = max([stage.period for stage in seconds] + [link.occupied for link in links])
    round_trip = sum(stage.period for stage in seconds) + sum(link.total for link in links)
    return (micro_batches - 1) * slowest + round_trip if micro_batches else 0.0


def ideal_bubble(ranks: int, micro_batches: int) -> float:
    """The part of the time in which ranks of equal speed wait, under GPipe and 1F1B without link times."""
    return (ranks - 1) / (micro_batches + ranks - 1) if micro_batches else 0.0
