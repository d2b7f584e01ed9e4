"""A trainer that was started again goes on with the living workers of its job.

The hub begins an epoch of the same ranks with this process as their trainer. Each rank says how far it got and gives
back what the trainer before left with it (`notes.py`). A step that some ranks have committed is committed by all, as
after the loss of a worker; ranks that hold nothing get the state of others.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distensor.comm.identity import new_key_and_csr
from distensor.core import DRIVER_RANK, Clock, Epoch, JobId, ParallelConfig, Rank, RankLayout
from distensor.core.control import JobState, Reconfiguration, TakeOver, Unit, UnitKey
from distensor.core.errors import (
    HubUnreachableError,
    JobHeldError,
    StateLostError,
    WorkerFailedError,
    WorkerLostError,
)
from distensor.core.regrouping import without_lost
from distensor.training.connection import JobConnection
from distensor.training.dialing import Dialing, frame_limits
from distensor.training.job_watch import JobWatch
from distensor.training.members import Status, read_status, settlement, share_out
from distensor.training.next_epoch import MembersMissingError, meet, wait_for_members
from distensor.training.results import EarlierStep
from distensor.transport import Timeouts
from distensor.transport.driver import NOTE_PREFIX, Command

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.comm import HubClient
    from distensor.training.replies import Reply

logger = logging.getLogger(__name__)

HELD_SECONDS = 60.0
"""How long to wait for the hub to notice that the trainer before is gone."""
GIVE_UP_SECONDS = 120.0
READY_SECONDS = 15.0
CONNECT_SECONDS = 45.0
"""Longer than workers wait for a trainer that says nothing: they come once they have given up the one before."""
RETRY_SECONDS = 0.5
MOST_BYTES = 4 << 20
"""Of what a rank gives back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenOver:
    """A job whose ranks all hold the same committed step, and where its trainer stood then.

    Attributes:
        step: 0 where none was committed yet.
        position, states, run: as `Standpoint` has them.
        earlier: the newest steps that were committed before, oldest first.
        unpaid: what the hub may not have receipts of yet.
        load: what the load command said besides programs.
        programs: a hash of the programs of each rank.
    """

    connection: JobConnection
    step: int
    position: Mapping[str, Any] | None
    states: Mapping[str, Tensor]
    run: Mapping[str, Any]
    earlier: tuple[EarlierStep, ...]
    unpaid: tuple[Unit, ...]
    load: Mapping[str, Any]
    programs: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedOver:
    """What one rank gave back."""

    position: Mapping[str, Any] | None
    run: Mapping[str, Any] | None
    states: Mapping[str, Tensor]
    units: Mapping[int, Sequence[int]]
    """By step: the epoch, and the micro-batches of each rank."""
    record: Sequence[EarlierStep]
    load: Mapping[str, Any]
    programs: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    epoch: Epoch
    parallel: ParallelConfig
    key_pem: bytes = field(repr=False)


def take_over(*, client: HubClient, job_id: JobId, clock: Clock, largest_tensor: int) -> TakenOver:
    """Take the place of a trainer that has ended.

    Raises:
        JobHeldError: the hub hears the job's trainer.
        ControlError: the hub knows no such job, or it has ended; AuthenticationError: it is another account's.
        StateLostError: some part of the model is held by no rank any more; the job has been ended.
        WorkerLostError, JobFailedError: too few ranks are left.
    """
    return _Taking(client, job_id, clock, largest_tensor).run()


class _Taking:
    def __init__(self, client: HubClient, job_id: JobId, clock: Clock, largest_tensor: int) -> None:
        self._client = client
        self._job_id = job_id
        self._clock = clock
        self._dialing = Dialing(timeouts=Timeouts(connect=CONNECT_SECONDS), limits=frame_limits(largest_tensor))

    def run(self) -> TakenOver:
        asked = self._ask()
        self._watch = JobWatch(self._client, self._job_id, self._clock)
        deadline = self._clock.monotonic() + GIVE_UP_SECONDS
        try:
            while True:
                alive = set(range(asked.parallel.world_size))
                error: WorkerLostError
                try:
                    connection = self._connect(asked)
                except MembersMissingError as missing:
                    alive, error = alive - missing.ranks, missing
                else:
                    try:
                        return _settled(connection)
                    except StateLostError:
                        connection.leave()
                        raise
                    except WorkerLostError as lost:
                        alive, error = alive - connection.gone(), lost
                        connection.leave()
                    except BaseException:  # whatever it is: a trainer that gives up is not to be heard any longer
                        connection.leave()
                        raise
                logger.warning("taking over job %s: %s", self._job_id, error)
                if self._clock.monotonic() >= deadline:
                    raise error
                asked = self._regroup(asked, alive, error)
        except StateLostError as error:
            self._client.end_job(self._job_id, JobState.CANCELLED, f"its trainer was started again: {error}")
            raise

    def _ask(self) -> _Asked:
        key_pem, csr_pem = new_key_and_csr(self._job_id, None, DRIVER_RANK)
        taken = TakeOver(job_id=self._job_id, request=uuid.uuid4().hex, csr_pem=csr_pem)
        deadline = self._clock.monotonic() + HELD_SECONDS
        while True:
            try:
                epoch, parallel = self._client.take_over_job(taken)
                return _Asked(epoch=epoch, parallel=parallel, key_pem=key_pem)
            except (JobHeldError, HubUnreachableError):
                if self._clock.monotonic() >= deadline:
                    raise
                self._clock.sleep(RETRY_SECONDS)

    def _connect(self, asked: _Asked) -> JobConnection:
        ranks = asked.parallel.world_size
        update = wait_for_members(self._watch, self._job_id, asked.epoch, ranks, READY_SECONDS)
        assert update.topology is not None
        return JobConnection(
            client=self._client,
            watch=self._watch,
            plane=meet(update, self._job_id, asked.key_pem, self._dialing, self._clock),
            topology=update.topology,
            clock=self._clock,
            dialing=replace(self._dialing, timeouts=Timeouts()),
        )

    def _regroup(self, asked: _Asked, alive: set[int], error: WorkerLostError) -> _Asked:
        regrouping = without_lost(asked.parallel, alive)
        if regrouping is None:
            raise StateLostError(f"no whole replica is left: {error}") from error
        key_pem, csr_pem = new_key_and_csr(self._job_id, None, DRIVER_RANK)
        change = Reconfiguration(
            job_id=self._job_id,
            request=uuid.uuid4().hex,
            epoch=asked.epoch,
            parallel=regrouping.parallel,
            continues=regrouping.continues,
            csr_pem=csr_pem,
        )
        deadline = self._clock.monotonic() + HELD_SECONDS
        while True:
            try:
                epoch = self._client.reconfigure_job(change)
                return _Asked(epoch=epoch, parallel=regrouping.parallel, key_pem=key_pem)
            except HubUnreachableError:
                if self._clock.monotonic() >= deadline:
                    raise
                self._clock.sleep(RETRY_SECONDS)


def _settled(connection: JobConnection) -> TakenOver:
    """All ranks at the newest step that any of them has committed."""
    replies = _ask_ranks(connection)
    statuses = [_whole(read_status(reply)) for reply in replies]
    layout = RankLayout(connection.topology.parallel)
    newest = max((status.step for status in statuses if status.step is not None), default=0)
    apart = any(map(_exchanges_updates, replies))
    plan = settlement(statuses, layout, newest, apart=apart)
    behind = [s.rank for s in statuses if s.step != newest and s.prepared == newest and plan.sums is not None]
    if behind:
        connection.command(Command.RESOLVE, {"step": newest, "sums": plan.sums}, only=behind)
    if plan.shares:
        share_out(connection, plan.shares, newest, equal=not apart)
    if behind or plan.shares:
        replies = _ask_ranks(connection)
    return _taken(connection, newest, [read_handed_over(reply) for reply in replies])


def _exchanges_updates(reply: Reply) -> bool:
    """Whether replicas have residuals of their own, so that ranks of one place hold the same only in part."""
    optimizer = read_handed_over(reply).load.get("optimizer")
    return isinstance(optimizer, dict) and optimizer.get("sparse") is not None


def _whole(status: Status) -> Status:
    """A rank whose weights were still coming gets all of them now: nobody else knows what it lacks."""
    return replace(status, step=None, prepared=None) if status.missing else status


def _ask_ranks(connection: JobConnection) -> list[Reply]:
    return connection.command(Command.TAKE_OVER, {}, most_bytes=dict.fromkeys(connection.ranks, MOST_BYTES))


def _taken(connection: JobConnection, step: int, handed: Sequence[HandedOver]) -> TakenOver:
    noted = next((each for each in handed if each.run is not None), None)
    if noted is None and step > 0:
        raise StateLostError(f"the workers hold step {step}, and none of them knows where its trainer stood")
    record = {earlier.step: earlier for each in handed for earlier in each.record if earlier.step <= step}
    units = {number: counts for each in handed for number, counts in each.units.items() if number <= step}
    return TakenOver(
        connection=connection,
        step=step,
        position=None if noted is None else noted.position,
        states={} if noted is None else noted.states,
        run={} if noted is None or noted.run is None else noted.run,
        earlier=tuple(record[number] for number in sorted(record)),
        unpaid=tuple(unit for number in sorted(units) for unit in _units(connection.job_id, number, units[number])),
        load=next(each.load for each in handed if each.load),
        programs={rank: each.programs for rank, each in enumerate(handed)},
    )


def _units(job_id: JobId, step: int, counts: Sequence[int]) -> list[Unit]:
    epoch, *by_rank = counts
    return [
        Unit(key=UnitKey(job_id=job_id, epoch=Epoch(epoch), step=step, rank=Rank(rank)), micro_batches=count)
        for rank, count in enumerate(by_rank)
        if count > 0
    ]


def read_handed_over(reply: Reply) -> HandedOver:
    """Raises WorkerFailedError naming the rank."""
    note, unpaid, load = (reply.meta.get(key) for key in ("note", "unpaid", "load"))
    words: Mapping[str, Any] = note if isinstance(note, dict) else {}
    position, run = words.get("position"), words.get("run")
    record = reply.tensors.get("record")
    fine = (
        (position is None or isinstance(position, dict))
        and (run is None or isinstance(run, dict))
        and isinstance(load, dict)
        and isinstance(unpaid, list)
        and all(map(_is_row, unpaid))
        and record is not None
        and record.dim() == 2
        and record.shape[1] == 4
    )
    if not fine or record is None or not isinstance(unpaid, list) or not isinstance(load, dict):
        raise WorkerFailedError(f"{reply.who} hands over what nobody left there: {str(reply.meta)[:200]}")
    return HandedOver(
        position=position,
        run=run,
        states={
            k.removeprefix(NOTE_PREFIX): tensor for k, tensor in reply.tensors.items() if k.startswith(NOTE_PREFIX)
        },
        units={row[0]: row[1] for row in unpaid},
        record=[
            EarlierStep(step=int(number), loss=loss, tokens=int(weight), grad_norm=norm)
            for number, loss, weight, norm in record.double().tolist()
        ],
        load=load,
        programs=str(reply.meta.get("programs"))[:64],
    )


def _is_row(row: Any) -> bool:
    pair = isinstance(row, list) and len(row) == 2 and type(row[0]) is int and isinstance(row[1], list)
    return pair and len(row[1]) > 1 and all(type(count) is int and count >= 0 for count in row[1])
