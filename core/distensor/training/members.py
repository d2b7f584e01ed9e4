"""The members of a running job: what happens when some are lost, and how further ones come in.

A loss ends the epoch. The ranks that are left go on in the next one, as many replicas as they make up, with what they
hold; the step in hand is committed by all of them where any rank had decided it, and begun anew where none had. A
replica that is missing is asked for in the background while the others train, and comes in between two steps, with
the state of ranks of its own places, checked by hash. Where gradients are summed it takes part from then on, and its
state comes while the others train (`joining.py`); else they wait for the copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from distensor.core import Clock, RankLayout
from distensor.core.errors import (
    ControlError,
    HubUnreachableError,
    PlacementError,
    StateLostError,
    WorkerFailedError,
    WorkerLostError,
)
from distensor.core.regrouping import Place, Regrouping, place_of, with_replaced, with_replicas, without_lost
from distensor.training.joining import Asking, Joining
from distensor.training.next_epoch import MembersMissingError
from distensor.training.replies import Reply, agreed
from distensor.transport.driver import Command

if TYPE_CHECKING:
    from distensor.core import ParallelConfig
    from distensor.core.control import Topology

logger = logging.getLogger(__name__)

RECOVERY_SECONDS = 120.0
"""How long a job may be without enough members before it is given up."""
READY_SECONDS = 10.0
"""How long ranks that only go on may take to say so; longer than that, and they are lost too."""
START_SECONDS = 90.0
"""How long new workers may take to start."""
FIRST_TRY_SECONDS, LONGEST_TRY_SECONDS = 1.0, 60.0
"""The wait before a missing replica is asked for, and between two tries at most."""
RETRY_SECONDS = 1.0
POLL_SECONDS = 0.005
MOST_SOURCES = 4
NO_HOPE = (
    "No other rank holds what it held, and there is no checkpoint to go on from: use data_parallel above 1, or "
    "checkpoint=FOLDER with checkpoint_every=N"
)


class Members(Asking, Protocol):
    """What is needed of `JobConnection`."""

    exit_reason_seconds: float
    topology: Topology

    @property
    def ranks(self) -> range: ...

    @property
    def asked(self) -> bool: ...

    @property
    def asked_parallel(self) -> ParallelConfig: ...

    def gone(self) -> set[int]: ...

    def leave(self) -> None: ...

    def ask_for(self, regrouping: Regrouping, bytes_per_rank: tuple[int, ...] = ()) -> None: ...

    def is_next_ready(self) -> bool: ...

    def enter_next(self, timeout: float) -> None: ...

    def explained(self, error: WorkerLostError) -> WorkerLostError: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How far a rank got: its newest committed step (None: it holds nothing), and one that lacks only the sums.
    `exchanges`: how many are in what it has in common with the other replicas, where these exchange updates."""

    rank: int
    step: int | None
    prepared: int | None
    sums: Mapping[str, Any] | None
    exchanges: int = 0
    missing: int = 0
    """Weights that have not come yet to a rank that takes part already."""


class Membership:
    """Not safe to use from several threads.

    Args:
        replicas: how many there should be.
        bytes_per_rank: predicted memory for a mesh.
        apart: whether replicas keep their own gradients and exchange updates, so that ranks of one place hold the same
            to the bit only in part.
        cut: whether a weight is cut over the replicas, so that the loss of any rank is one of state.
        restorable: whether lost state can be had from elsewhere.
        on_change: called with the mesh of each epoch that was entered, before anything is asked of its ranks.
        on_idle: called with the replicas that cannot train yet, since weights are still to come to them.
    """

    def __init__(
        self,
        connection: Members,
        *,
        replicas: int,
        clock: Clock,
        bytes_per_rank: Callable[[ParallelConfig], tuple[int, ...]],
        apart: bool,
        cut: bool,
        restorable: Callable[[], bool],
        on_change: Callable[[ParallelConfig], None],
        on_idle: Callable[[frozenset[int]], None],
    ) -> None:
        self._connection = connection
        self._replicas = replicas
        self._clock = clock
        self._bytes_per_rank = bytes_per_rank
        self._apart = apart
        self._cut = cut
        self._restorable = restorable
        self._on_change = on_change
        self._on_idle = on_idle
        self._joining = Joining({})
        self._growth: _Growth | None = None
        self._try_at = clock.monotonic()
        self._wait = FIRST_TRY_SECONDS

    @property
    def parallel(self) -> ParallelConfig:
        return self._connection.topology.parallel

    # -- losing ---------------------------------------------------------------------------------------------------

    def recover(self, error: WorkerLostError, step: int | None) -> list[Reply]:
        """Bring the job into an epoch of those that are left; `step` is the one in hand.

        Returns:
            The answers of ranks for which `step` is committed; none where it has to be begun anew.

        Raises:
            StateLostError: there are members again, but nobody holds some part of the model.
            WorkerLostError: there are not enough members, and none come; or nothing would bring back what they held.
        """
        alive, parallel = set(self._connection.ranks) - self._connection.gone(), self.parallel
        self._check_hope(error, alive)
        logger.warning("%s; going on without it", error)
        self._connection.leave()
        alive, parallel = self._in_growth(alive, parallel)
        return self._regroup(error, alive, parallel, step)

    def _check_hope(self, error: WorkerLostError, alive: set[int]) -> None:
        """Raise, with the reason, where nobody will hold what the lost ranks held."""
        if (self._cut or without_lost(self.parallel, alive) is None) and not self._restorable():
            raise WorkerLostError(f"{self._connection.explained(error)}. {NO_HOPE}")

    def _in_growth(self, alive: set[int], parallel: ParallelConfig) -> tuple[set[int], ParallelConfig]:
        """The same ranks as numbers of the epoch that was being prepared, if one was."""
        growth, self._growth = self._growth, None
        if growth is None:
            return alive, parallel
        growth.thread.join()
        if not self._connection.asked:
            return alive, parallel
        continues = growth.regrouping.continues
        return {rank for rank, before in enumerate(continues) if before in alive}, self._connection.asked_parallel

    def _regroup(
        self, error: WorkerLostError, alive: set[int], parallel: ParallelConfig, step: int | None
    ) -> list[Reply]:
        deadline = self._clock.monotonic() + RECOVERY_SECONDS
        while True:
            regrouping = without_lost(parallel, alive) or with_replaced(parallel, alive)
            try:
                self._connection.ask_for(regrouping, self._bytes_per_rank(regrouping.parallel))
                parallel, alive = regrouping.parallel, set(range(regrouping.parallel.world_size))
                self._connection.enter_next(START_SECONDS if regrouping.new else READY_SECONDS)
                return self._begin(step)
            except MembersMissingError as missing:
                alive = alive - missing.ranks
                logger.warning("%s", missing)
            except StateLostError as gone:
                raise StateLostError(f"{error}; {gone}") from gone
            except WorkerLostError as again:  # while the state was being shared out
                alive = set(self._connection.ranks) - self._connection.gone()
                logger.warning("%s", again)
                self._connection.leave()
            except (PlacementError, HubUnreachableError) as full:
                if self._clock.monotonic() >= deadline:
                    raise WorkerLostError(f"{error}; and nobody takes its place: {full}") from full
                self._clock.sleep(RETRY_SECONDS)
            if self._clock.monotonic() >= deadline:
                raise WorkerLostError(f"{error}; the job found no members within {RECOVERY_SECONDS:g} s") from error

    def _begin(self, step: int | None) -> list[Reply]:
        """The first commands of an epoch: who holds what, and who has to get it."""
        self._on_change(self.parallel)
        self._wait, self._try_at = FIRST_TRY_SECONDS, self._clock.monotonic() + FIRST_TRY_SECONDS
        statuses = [read_status(reply) for reply in self._connection.command(Command.STATUS, {})]
        plan = settlement(statuses, RankLayout(self.parallel), step, apart=self._apart)
        answers: list[Reply] = []
        if plan.resolved:
            meta = {"step": step, "sums": plan.sums}
            answers = self._connection.command(Command.RESOLVE, meta, only=plan.resolved)
        if plan.shares:
            newest = max(status.step or 0 for status in statuses)
            share_out(self._connection, plan.shares, newest, begin=self.beside)
        self._join(statuses, plan.shares)
        return answers

    def _join(self, statuses: Sequence[Status], shares: Mapping[Place, Share]) -> None:
        """Who takes part without having everything: those that came, and those that had not got all before."""
        layout = RankLayout(self.parallel)
        fresh = {rank for share in shares.values() for rank in share.joiners} if self.beside else set()
        lacking = fresh | {status.rank for status in statuses if status.missing}
        whole = {status.rank for status in statuses if status.step is not None} - lacking
        places = {rank: place_of(layout.coordinates(rank)) for rank in self._connection.ranks}
        self._joining = Joining(
            {
                rank: [other for other in sorted(whole) if places[other] == places[rank]][:MOST_SOURCES]
                for rank in sorted(lacking)
            }
        )
        self._tell_idle()

    def _tell_idle(self) -> None:
        layout = RankLayout(self.parallel)
        self._on_idle(frozenset(layout.coordinates(rank).dp for rank in self._joining.ranks))

    @property
    def beside(self) -> bool:
        """Whether state may come while the others train: each weight's update depends on sums that all ranks have."""
        return not self._apart and not self._cut

    def complete(self) -> None:
        """Wait until nothing is missing anywhere."""
        while self._joining.ranks:
            self._advance()
            self._clock.sleep(POLL_SECONDS)

    def _advance(self) -> None:
        before = set(self._joining.ranks)
        try:
            self._joining.advance(self._connection)
        except StateLostError:
            raise
        except WorkerLostError as error:
            self.recover(error, None)
            return
        if done := before - set(self._joining.ranks):
            logger.info("ranks %s hold all that the others hold, and train from now on", sorted(done))
            self._tell_idle()

    # -- growing --------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Between two steps: ask for a replica that is missing, and let it in once it is ready."""
        if self._joining.ranks:
            self._advance()
            return
        if self.parallel.data_parallel >= self._replicas:
            return
        growth, now = self._growth, self._clock.monotonic()
        if growth is None:
            if now >= self._try_at:
                self._growth = self._ask_for_more()
        elif not growth.thread.is_alive():
            self._look_after(growth, now)

    def _ask_for_more(self) -> _Growth:
        regrouping = with_replicas(self.parallel, self._replicas)

        def ask() -> None:
            try:
                self._connection.ask_for(regrouping, self._bytes_per_rank(regrouping.parallel))
            except ControlError as error:
                logger.info("no further replica for now: %s", error)

        thread = threading.Thread(target=ask, name="ask-for-members", daemon=True)
        thread.start()
        return _Growth(regrouping=regrouping, since=self._clock.monotonic(), thread=thread)

    def _look_after(self, growth: _Growth, now: float) -> None:
        if not self._connection.asked:
            self._growth = None
            self._wait = min(2 * self._wait, LONGEST_TRY_SECONDS)
            self._try_at = now + self._wait
            return
        try:
            ready = self._connection.is_next_ready()
            if not ready and now - growth.since < START_SECONDS:
                return
            self._growth = None
            self._connection.enter_next(0.0)
            self._begin(None)
        except MembersMissingError as missing:
            self._growth = None
            logger.warning("%s; going on as before", missing)
            parallel = self._connection.asked_parallel
            self._drop(missing, set(range(parallel.world_size)) - missing.ranks, parallel)
        except StateLostError:
            raise
        except WorkerLostError as error:
            self.recover(error, None)

    def _drop(self, missing: MembersMissingError, alive: set[int], parallel: ParallelConfig) -> None:
        self._regroup(missing, alive, parallel, None)
        self._wait = LONGEST_TRY_SECONDS
        self._try_at = self._clock.monotonic() + self._wait


@dataclass(kw_only=True, slots=True)
class _Growth:
    """An epoch with more replicas, asked for in the background."""

    regrouping: Regrouping
    since: float
    thread: threading.Thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """At one place of the mesh: who holds the state, and who has to get it."""

    sources: tuple[int, ...]
    joiners: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """What has to be done so that all ranks hold the same committed step."""

    resolved: tuple[int, ...]
    """Ranks that have committed the step in hand or can; empty where it has to be begun anew."""
    sums: Mapping[str, Any] | None
    shares: Mapping[Place, Share]


def settlement(statuses: Sequence[Status], layout: RankLayout, step: int | None, *, apart: bool = False) -> Settlement:
    """Pure. A step is decided from sums over all ranks, which each rank enters with its gradients complete: where one
    rank has those sums, every other can commit from them.

    Where replicas take their steps `apart` and exchange updates, a rank that was not in the step does without it; what
    ranks of one place have in common is made the same.

    Raises:
        StateLostError: some place of the mesh has nobody that holds anything.
    """
    newest = max((status.step for status in statuses if status.step is not None), default=0)
    known = [status.sums for status in statuses if status.step == newest and status.sums is not None]
    sums = known[0] if known else None
    in_hand = step is not None and newest == step
    able = {
        status.rank
        for status in statuses
        if status.step == newest or (in_hand and sums is not None and status.prepared == newest)
    }
    by_place: dict[Place, list[Status]] = {}
    for status in statuses:
        by_place.setdefault(place_of(layout.coordinates(status.rank)), []).append(status)
    share_at = _share_of_exchanges if apart else _share_at
    shares = {place: share for place, here in by_place.items() if (share := share_at(place, here, able)) is not None}
    return Settlement(resolved=tuple(sorted(able)) if in_hand else (), sums=sums, shares=shares)


def _share_at(place: Place, here: Sequence[Status], able: Collection[int]) -> Share | None:
    """Ranks to which weights are still to come go on as they are, if they can commit the step."""
    whole = [status.rank for status in here if status.rank in able and not status.missing]
    if not whole:
        raise _nobody_holds(place)
    joiners = tuple(status.rank for status in here if status.rank not in able)
    return Share(sources=tuple(whole[:MOST_SOURCES]), joiners=joiners) if joiners else None


def _share_of_exchanges(place: Place, here: Sequence[Status], able: Collection[int]) -> Share | None:
    """Whoever has the newest exchange. Of another place all may lack it: they hold the same all the same."""
    del able
    loaded = [status for status in here if status.step is not None]
    if not loaded:
        raise _nobody_holds(place)
    newest = max(status.exchanges for status in loaded)
    holders = [status.rank for status in loaded if status.exchanges == newest]
    joiners = tuple(status.rank for status in here if status.rank not in holders)
    return Share(sources=tuple(holders[:MOST_SOURCES]), joiners=joiners) if joiners else None


def share_out(
    connection: Members, shares: Mapping[Place, Share], step: int, *, begin: bool = False, equal: bool = False
) -> None:
    """Let ranks that hold nothing get what others of their place hold, of `step`.

    Args:
        begin: programs only, since weights come while the others train.
        equal: all then hold the same to the bit, which is looked at.

    Raises:
        WorkerFailedError: they do not.
        WorkerLostError: a rank was lost meanwhile.
    """
    layout = RankLayout(connection.topology.parallel)
    orders: dict[int, dict[str, Any]] = {}
    for rank in connection.ranks:
        share = shares.get(place_of(layout.coordinates(rank)))
        if share is not None:
            orders[rank] = {"sources": list(share.sources), "joiners": list(share.joiners), "step": step}
    replies = connection.command(Command.SHARE, {"begin": begin}, extra=orders, only=orders.keys())
    if equal:
        for share in shares.values():
            involved = [reply for reply in replies if reply.rank in (*share.sources, *share.joiners)]
            agreed(involved, "state", [str(reply.meta.get("digest"))[:64] for reply in involved])
    logger.info("step %d: %d ranks get the state of others", step, sum(len(s.joiners) for s in shares.values()))


def _nobody_holds(place: Place) -> StateLostError:
    tp, pp, cp = place
    return StateLostError(f"nobody holds the weights of tensor rank {tp}, pipeline rank {pp}, context rank {cp}")


def read_status(reply: Reply) -> Status:
    """Raises WorkerFailedError naming the rank."""
    step, prepared, sums = (reply.meta.get(key) for key in ("step", "prepared", "sums"))
    exchanges, missing = reply.meta.get("exchanges", 0), reply.meta.get("missing", 0)
    counts = (step, prepared, exchanges, missing)
    numbers = all(value is None or (type(value) is int and value >= 0) for value in counts)
    if not numbers or not (sums is None or isinstance(sums, dict)):
        raise WorkerFailedError(f"{reply.who} says it is at step {str(step)[:20]}, prepared {str(prepared)[:20]}")
    return Status(
        rank=reply.rank, step=step, prepared=prepared, sums=sums, exchanges=exchanges or 0, missing=missing or 0
    )
