"""Which job is placed when, and why: quotas, the queue, and placement. Pure; the machine carries it out.

A job that fits may pass one that waits and does not, until that one has waited for `patience` seconds: from then on
nobody passes it, unless its account's quota holds it back or the nodes that are here could not take it even if all of
them were free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from distensor.core.control import JobSpec, JobState, Reconfiguration
from distensor.core.errors import PlacementError
from distensor.core.ids import JobId, Rank
from distensor.core.job_report import JobReport, JobSummary
from distensor.hub import jobs
from distensor.hub.accounts import NO_QUOTA, Quota
from distensor.hub.membership import Membership, Slot
from distensor.hub.placement import Place, explained, place
from distensor.hub.records import JobRecord
from distensor.hub.waiting import Waiting


class Schedule:
    """Over the machine's own tables of jobs and nodes; `jobs` and `live` are looked at and never changed."""

    def __init__(
        self,
        jobs: Mapping[JobId, JobRecord],
        live: Set[JobId],
        members: Membership,
        patience: float,
        quotas: Mapping[str, Quota],
        now: float,
    ) -> None:
        self._jobs = jobs
        self._live = live
        self._members = members
        self._patience = patience
        self._quotas = quotas
        self._waiting = Waiting()
        for job in jobs.values():
            if job.state is JobState.QUEUED and job.wish is not None:
                self._waiting.add(job.job_id, job.wish.priority, now)
        self._freed = 0
        self._served = -1, -1, -1

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self.freed()

    def freed(self) -> None:
        """There may be more room than before."""
        self._freed += 1

    def waits_no_longer(self, job_id: JobId) -> None:
        """The job has its places now, or needs none any more."""
        self._waiting.remove(job_id)
        self.freed()

    def used(self) -> Counter[Slot]:
        """How many ranks of live jobs each device has."""
        return Counter((rank.node_id, rank.device_id) for job_id in self._live for rank in self._jobs[job_id].ranks)

    # Placement

    def placed(self, job: JobRecord, spec: JobSpec, now: float) -> JobRecord:
        """The job with a device for every rank.

        Raises:
            PlacementError: no place, no quota, or another job's turn.
        """
        self._check_turn(job, spec, now)
        offers = self._members.offers(self.used(), now)
        places = place(spec, offers, self._members.away(now))
        return replace(
            job,
            state=JobState.PLACED,
            reason="",
            wish=replace(spec, csr_pem="", bytes_per_rank=()),
            ranks=tuple(jobs.new_rank(job.job_id, job.epoch, one) for one in places),
            placement=explained(spec, offers, places),
        )

    def _check_turn(self, job: JobRecord, spec: JobSpec, now: float) -> None:
        quota = self._quotas.get(job.owner, NO_QUOTA)
        if spec.priority > quota.priority:
            raise PlacementError(
                f"job {spec.name!r} asks for priority {spec.priority}; account {job.owner} may ask for at most "
                f"{quota.priority}"
            )
        if why := self._over_quota(job, _size(spec)):
            raise PlacementError(why)
        for other in self._waiting.in_order():
            if other == job.job_id:
                return
            if self._holds_others_back(self._jobs[other], now):
                raise PlacementError(
                    f"job {spec.name!r} comes after {self._jobs[other].name!r}, which has waited longer and takes the "
                    "next free slots"
                )

    def _over_quota(self, job: JobRecord, size: int) -> str | None:
        """Why the job may not have so many ranks, aggregators among them; None when it may."""
        most, used = self._quotas.get(job.owner, NO_QUOTA).workers, self._used_by_others(job)
        if most is None or used + size <= most:
            return None
        return (
            f"job {job.name!r} needs {size} workers; account {job.owner} uses {used} for other jobs and may use {most} "
            "at once"
        )

    def _used_by_others(self, job: JobRecord) -> int:
        """How many ranks the other live jobs of its account have."""
        others = (self._jobs[one] for one in self._live if one != job.job_id)
        return sum(len(other.ranks) for other in others if other.owner == job.owner)

    def _holds_others_back(self, job: JobRecord, now: float) -> bool:
        """It has waited for too long, or fits now and is placed in a moment."""
        if job.wish is None or self._over_quota(job, _size(job.wish)):
            return False
        patient = self._waiting.seconds(job.job_id, now) < self._patience
        return self._fits(job.wish, self.used() if patient else {}, now)

    def _fits(self, wish: JobSpec, used: Mapping[Slot, int], now: float) -> bool:
        try:
            place(wish, self._members.offers(used, now))
        except PlacementError:
            return False
        return True

    def places_of_new(self, job: JobRecord, change: Reconfiguration, now: float) -> tuple[Place, ...]:
        """Slots of ranks that do not go on count as free: their workers end now.

        Raises:
            PlacementError: no place, or more ranks than before and than the account may have. Aggregators beyond that
                are left out like those for which there is no room.
        """
        new = [Rank(rank) for rank, before in enumerate(change.continues) if before is None]
        aggregators = self._aggregators_within_quota(job, change)
        if not new and not aggregators:
            return ()
        used = self.used()
        for rank in job.ranks:
            if rank.rank not in change.continues:
                used[rank.node_id, rank.device_id] -= 1
        spec = JobSpec(
            submission=change.request,
            name=job.name,
            parallel=change.parallel,
            csr_pem="",
            bytes_per_rank=change.bytes_per_rank,
            device_kinds=() if job.wish is None else job.wish.device_kinds,
            aggregators=aggregators,
            split_tensor=job.wish is not None and job.wish.split_tensor,
        )
        return place(spec, self._members.offers(used, now), self._members.away(now), new)

    def _aggregators_within_quota(self, job: JobRecord, change: Reconfiguration) -> tuple[str, ...]:
        """A job may always keep as many ranks as it has, also when its account's limit has become smaller."""
        size, most = change.parallel.world_size, self._quotas.get(job.owner, NO_QUOTA).workers
        if most is None:
            return change.aggregators
        if size > len(job.ranks) and (why := self._over_quota(job, size)):
            raise PlacementError(why)
        room = max(most - self._used_by_others(job), len(job.ranks))
        return change.aggregators[: room - size]

    # The queue

    def enqueue(self, job: JobRecord, spec: JobSpec, now: float) -> int:
        """Let a job wait; returns its place in the queue, from 1.

        Raises:
            PlacementError: its account has as many jobs in the queue as it may have, or asks for too high a priority.
        """
        quota = self._quotas.get(job.owner, NO_QUOTA)
        if spec.priority > quota.priority:
            raise PlacementError(job.reason)
        mine = sum(self._jobs[one].owner == job.owner for one in self._waiting.in_order())
        if quota.waiting is not None and mine >= quota.waiting:
            raise PlacementError(
                f"account {job.owner} has {mine} jobs in the queue and may have {quota.waiting}; {job.reason}"
            )
        self._waiting.add(job.job_id, spec.priority, now)
        return self._waiting.in_order().index(job.job_id) + 1

    def served(self, now: float) -> Iterator[JobRecord]:
        """The jobs that waited and have a place now. Each has to be entered into the tables before the next is asked
        for. Nothing is tried while there cannot be more room than the last time."""
        seen = self._members.changes, self._freed, int(now / self._patience)
        if not len(self._waiting) or seen == self._served:
            return
        self._served = seen
        for job_id in self._waiting.in_order():
            job = self._jobs[job_id]
            if job.wish is None:
                continue
            try:
                placed = self.placed(job, job.wish, now)
            except PlacementError:
                continue
            self._waiting.remove(job_id)
            yield placed

    # What may be said about it

    def summaries(self, owner: str | None, *, ended: bool) -> list[JobSummary]:
        """The jobs of an owner, or of all: those that wait, in the order of the queue, then the others by their age."""
        queue = {job_id: position for position, job_id in enumerate(self._waiting.in_order(), 1)}
        found = [self._jobs[job_id] for job_id in (*queue, *(one for one in self._jobs if one not in queue))]
        return [
            jobs.summary_of(job, queue.get(job.job_id, 0))
            for job in found
            if owner in (None, job.owner) and (ended or not job.state.ended)
        ]

    def report(self, job_id: JobId, now: float) -> JobReport:
        """Why a job is where it is, or what it waits for. The job is known."""
        job, missing = self._jobs[job_id], ""
        if job.wish is not None and job_id in self._waiting:
            try:
                self.placed(job, job.wish, now)
                missing = "nothing: it is placed in a moment"
            except PlacementError as error:
                missing = str(error)
                offers = self._members.offers(self.used(), now)
                job = replace(job, placement=explained(job.wish, offers, ()))
        queue = self._waiting.in_order()
        summary = jobs.summary_of(job, queue.index(job_id) + 1 if job_id in queue else 0)
        names = {node_id: self._members.info(node_id).name for node_id in job.node_ids}
        return replace(jobs.report_of(job, summary, names), missing=missing)


def _size(spec: JobSpec) -> int:
    """How many ranks a job has, aggregators among them."""
    return spec.parallel.world_size + len(spec.aggregators)
