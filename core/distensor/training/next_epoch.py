"""How a trainer meets the members of an epoch that it asked the hub for."""

from __future__ import annotations

from distensor.core import Clock, Epoch, JobId
from distensor.core.control import JobState, JobUpdate, WorkerState
from distensor.core.errors import (
    HandshakeError,
    JobFailedError,
    PeerLostError,
    TransportError,
    WorkerLostError,
)
from distensor.training.dialing import Dialing, dial
from distensor.training.job_watch import JobWatch
from distensor.transport import DataPlane


class MembersMissingError(WorkerLostError):
    """Ranks of the next epoch that do not get ready. `ranks` are numbers of that epoch."""

    def __init__(self, ranks: frozenset[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = ranks


def check_members(update: JobUpdate) -> None:
    """Raise MembersMissingError where ranks of an epoch that has not begun cannot be started."""
    down = {
        int(change.rank): change.reason
        for change in update.workers
        if change.state in (WorkerState.EXITED, WorkerState.BROKEN, WorkerState.DRAINING)
    }
    if down and update.state is JobState.PLACED:
        said = "; ".join(f"rank {rank}: {reason or 'no reason given'}" for rank, reason in sorted(down.items()))
        raise MembersMissingError(frozenset(down), f"epoch {update.epoch} lacks {said}")


def wait_for_members(watch: JobWatch, job_id: JobId, epoch: Epoch, ranks: int, timeout: float) -> JobUpdate:
    """The update with the topology of `epoch`, which has `ranks` ranks.

    Raises:
        MembersMissingError: some cannot be started, or are not ready in time.
        JobFailedError: the hub has ended the job.
    """

    def told(update: JobUpdate) -> bool:
        if update.state.ended:
            return True
        if update.epoch != epoch:
            return False
        check_members(update)
        return update.state is not JobState.PLACED

    update = watch.wait_for(told, timeout)
    if update is None:
        latest = watch.latest
        here = {c.rank for c in latest.workers if c.state is WorkerState.READY} if latest is not None else set()
        late = frozenset(range(ranks)) - here
        raise MembersMissingError(late, f"epoch {epoch}: not ready within {timeout:g} s: ranks {sorted(late)}")
    if update.state is not JobState.RUNNING or update.topology is None:
        raise JobFailedError(f"job {job_id} is {update.state.value}: {update.reason or 'no reason given'}")
    return update


def meet(update: JobUpdate, job_id: JobId, key_pem: bytes, dialing: Dialing, clock: Clock) -> DataPlane:
    """Connect to all ranks of the epoch. Raises MembersMissingError."""
    try:
        return dial(update, job_id, update.epoch, key_pem, dialing, clock)
    except PeerLostError as error:
        raise MembersMissingError(frozenset({error.rank}), f"epoch {update.epoch}: {error}") from error
    except (TransportError, HandshakeError) as error:
        raise MembersMissingError(frozenset(), f"epoch {update.epoch}: {error}") from error
