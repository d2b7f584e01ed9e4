"""Bugs of many kinds, each put in by substituting a method; the simulator has to find every one of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from distensor.comm.outbox import ClaimBook
from distensor.core.ids import Generation
from distensor.hub import access, jobs, metering, service
from distensor.hub.authorization import Operation
from distensor.hub.door import Door
from distensor.hub.ledger.accounts import unit_name
from distensor.hub.machine import HubMachine
from distensor.hub.membership import Membership
from distensor.hub.scheduling import Schedule
from distensor.hub.service import HubService
from distensor.testing.hub_store import MemoryBooks
from distensor.testing.simulation import Promise, Settings
from distensor.testing.simulation.loop import PartyClock
from distensor.testing.simulation.network import Network

FINDING = Settings(faulty=60.0, every=2.0, settle=400.0)
"""The runs in which they are looked for; only the seed differs."""

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedBug:
    """What is planted, and the promises of which one has to be found broken."""

    name: str
    plant: Plant
    breaks: frozenset[Promise]
    rare: bool
    """It takes some seeds, or a whole run: looked for in `make soak`."""


BUGS: list[PlantedBug] = []


def breaks(*promises: Promise, rare: bool = False) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        BUGS.append(PlantedBug(name=plant.__name__, plant=plant, breaks=frozenset(promises), rare=rare))
        return plant

    return add


@breaks(Promise.EPOCH, Promise.DEFECT, rare=True)
def words_of_an_older_epoch_count(patch: pytest.MonkeyPatch) -> None:
    def only_of_no_job(self: Any, session: Any, job_id: Any, epoch: Any) -> Any:
        job = self._jobs.get(job_id)
        return [] if job is not None and not job.state.ended else whole(self, session, job_id, epoch)

    whole = HubMachine._release_stale
    patch.setattr(HubMachine, "_release_stale", only_of_no_job)


@breaks(Promise.LEDGER)
def a_claim_that_comes_again_is_credited_again(patch: pytest.MonkeyPatch) -> None:
    def change(self: Any, place: Any, after: Any) -> None:
        self._known[after.key] = self._changed[after.key] = after
        self._places[after.key] = place

    def post(self: MemoryBooks, postings: Iterable[Any]) -> None:
        for posting in postings:
            self._tables.money.transfers.pop(f"unit/{unit_name(posting.key)}", None)
        whole(self, postings)

    whole = MemoryBooks.post

    patch.setattr(metering._Entering, "_change", change)
    patch.setattr(MemoryBooks, "post", post)


@breaks(Promise.SURVIVES)
def the_hub_answers_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    def apply(self: Any, effects: Iterable[Any]) -> asyncio.Future[None]:
        saves = [effect for effect in effects if isinstance(effect, service._SAVES)]
        if saves:
            self._writer.submit(lambda books: service.save_all(books, saves, 0))
        return whole(self, [effect for effect in effects if effect not in saves])

    whole = HubService._apply
    patch.setattr(HubService, "_apply", apply)


@breaks(Promise.GENERATION, rare=True)
def the_generation_is_what_the_clock_says(patch: pytest.MonkeyPatch) -> None:
    def begin(self: HubMachine, **parts: Any) -> None:
        whole(self, **parts)

    def generation(self: MemoryBooks) -> Generation:
        return Generation(int(hub_clock[-1].now()))

    def reboot(self: PartyClock, since_boot: float) -> None:
        hub_clock.append(self)  # only hubs reboot
        restart(self, since_boot)

    hub_clock: list[PartyClock] = []
    whole, restart = HubMachine.__init__, PartyClock.reboot
    patch.setattr(HubMachine, "__init__", begin)
    patch.setattr(PartyClock, "reboot", reboot)
    patch.setattr(MemoryBooks, "begin_generation", generation)


@breaks(Promise.LEASE)
def leases_run_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartyClock, "monotonic", PartyClock.now)


@breaks(Promise.LEASE, rare=True)
def a_node_that_is_silent_stays(patch: pytest.MonkeyPatch) -> None:
    def is_connected(self: Membership, node: Any, now: float) -> bool:
        return node.session is not None and node.answered

    patch.setattr(Membership, "_is_connected", is_connected)


@breaks(Promise.GHOST)
def a_machine_that_comes_again_is_a_new_node(patch: pytest.MonkeyPatch) -> None:
    def admit(books: Any, token_hash: str, joining: access.Joining) -> Any:
        token = access.find_unspent(books, token_hash)
        return access._admit(books, replace(token, used_by=None), joining, None)

    patch.setattr(access, "admit", admit)


@breaks(Promise.SLOTS)
def slots_that_are_taken_are_given_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "used", lambda self: Counter())


@breaks(Promise.OWNER, rare=True)
def receipts_of_any_trainer_count(patch: pytest.MonkeyPatch) -> None:
    def receivable(books: Any, owner: str, key: Any) -> Any:
        return books.find_place(key.job_id, key.epoch, key.rank)

    def require_object(self: Any, who: Any, operation: Any, target: str, owner: Any, missing: str) -> Any:
        if operation is Operation.REPORT_UNITS and owner is not None:
            return owner
        return whole(self, who, operation, target, owner, missing)

    whole = Door.require_object
    patch.setattr(Door, "require_object", require_object)
    patch.setattr(metering, "_receivable", receivable)


@breaks(Promise.OWNER)
def nodes_get_the_certificates_of_all(patch: pytest.MonkeyPatch) -> None:
    def of_all(job: Any, node_id: Any, authority_pem: str) -> Any:
        return tuple(
            jobs.Certificate(rank=rank.rank, certificate_pem=rank.certificate_pem, authority_pem=authority_pem)
            for rank in job.ranks
        )

    patch.setattr(jobs, "certificates_of", of_all)


@breaks(Promise.SURVIVES)
def claims_are_answered_before_they_are_booked(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Any, number: Any, claims: Any) -> None:
        self._send(service.Send(session=number, message=service.ClaimsAnswer(batch=claims.batch)))
        node_id = self._machine.node_of(number)
        if node_id is not None:
            self._writer.submit(lambda books: service.record_claims(books, node_id, claims.units, hour=0))

    patch.setattr(HubService, "_claim", claim)


@breaks(Promise.SURVIVES, rare=True)
def a_job_that_ended_is_not_written(patch: pytest.MonkeyPatch) -> None:
    def update(self: MemoryBooks, job: Any) -> None:
        if not job.state.ended:
            whole(self, job)

    whole = MemoryBooks.update_job
    patch.setattr(MemoryBooks, "update_job", update)


@breaks(Promise.SURVIVES, Promise.SLOTS, rare=True)
def submissions_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def submitted(self: Any, owner: str, submission: str) -> None:
        return None

    def submit(self: Any, owner: str, spec: Any, now: float, *more: Any) -> Any:
        self._submissions.clear()
        return whole(self, owner, spec, now, *more)

    whole = HubMachine.submit
    patch.setattr(HubMachine, "submitted", submitted)
    patch.setattr(HubMachine, "submit", submit)


@breaks(Promise.LEDGER)
def claims_and_receipts_that_differ_are_credited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metering, "_settled", lambda unit: replace(unit, state=metering.UnitState.CREDITED))


@breaks(Promise.EPOCH)
def members_change_in_the_same_epoch(patch: pytest.MonkeyPatch) -> None:
    def reconfigured(job: Any, *more: Any) -> Any:
        return replace(whole(job, *more), epoch=job.epoch)

    whole = jobs.reconfigured
    patch.setattr(jobs, "reconfigured", reconfigured)


@breaks(Promise.LIVE, rare=True)
def claims_on_their_way_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClaimBook, "connection_lost", lambda self: None)


@breaks(Promise.LIVE, rare=True)
def a_job_without_a_trainer_goes_on_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HubMachine, "_overdue", lambda self, job, now: None)


@breaks(Promise.EPOCH, rare=True)
def a_request_that_is_repeated_is_another_one(patch: pytest.MonkeyPatch) -> None:
    """One that gets no answer and asks in other words is refused by a hub that has done it."""

    async def call(self: Network, party: str, method: str, request: Any, metadata: Any) -> Any:
        if method == "ReconfigureJob":
            request.request = f"{request.request}x"
        return await whole(self, party, method, request, metadata)

    whole = Network._call
    patch.setattr(Network, "_call", call)
