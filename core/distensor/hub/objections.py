"""A trainer objects to a unit: others computed something else. The node's work in that job is held until it is decided.

    units, credited and still open to challenge --objection--> held --release--> where they would be without it
                                                                    --void-----> the trainer's deposit, with the fee

An objection is remembered until the operator decides. So what is credited later is held as well: at the latest before
its challenge window ends, since nothing becomes payable without passing `hold_all`. Work is held in sums by the hour,
not unit by unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from distensor.core.control import Unit, UnitKey
from distensor.core.ids import Epoch, JobId, NodeId, Rank
from distensor.hub.ledger.accounts import fees, held, held_fees, payable, pending, trainer
from distensor.hub.ledger.transfers import Kind, Transfer, legs_of, post
from distensor.hub.ledger_books import MoneyBooks
from distensor.hub.metering import PlaceOfWork, receivable

WORK = "hold/work/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objection:
    """Of the owner of a job, to a unit. `at`: seconds of the hub's clock since 1970."""

    key: UnitKey
    node_id: NodeId
    owner: str
    at: int


class ObjectionBooks(MoneyBooks, Protocol):
    """One transaction."""

    def find_place(self, job_id: JobId, epoch: Epoch, rank: Rank) -> PlaceOfWork | None: ...

    def save_objection(self, objection: Objection) -> None:
        """Once: the same unit again changes nothing, also when it has been decided."""

    def objections(self) -> Sequence[Objection]:
        """Those that nobody has decided, oldest first."""

    def decide_objections(self, job_id: str, node_id: str, decision: str) -> None:
        """All of a node in a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldWork:
    """What a node's work in a job would bring, the fee included, and to how many units the trainer has objected."""

    job_id: JobId
    node_id: NodeId
    owner: str
    objections: int
    since: int
    micro: int


def record_objections(books: ObjectionBooks, owner: str, units: Iterable[Unit], *, at: int) -> set[NodeId]:
    """Enter a trainer's objections and hold the work of the nodes, which are returned. Repeating them changes nothing.

    Raises:
        ControlError: a unit that was never placed, or of another trainer's job: the words are the same.
    """
    nodes: set[tuple[JobId, NodeId]] = set()
    for unit in units:
        place = receivable(books, owner, unit.key)
        books.save_objection(Objection(key=unit.key, node_id=place.node_id, owner=owner, at=at))
        nodes.add((unit.key.job_id, place.node_id))
    open_ = {(one.key.job_id, one.node_id) for one in books.objections()} if nodes else set()
    for job_id, node_id in sorted(nodes & open_):
        hold_rest(books, job_id, node_id, at=at)
    return {node_id for _, node_id in nodes}


def hold_all(books: ObjectionBooks, *, at: int) -> None:
    """Hold what was credited since to all nodes whose work is objected to."""
    for job_id, node_id in sorted({(one.key.job_id, one.node_id) for one in books.objections()}):
        hold_rest(books, job_id, node_id, at=at)


def hold_rest(books: MoneyBooks, job_id: str, node_id: str, *, at: int) -> None:
    """Hold what a node was credited in a job, still open to challenge, and was never held yet."""
    books.alone()
    first = books.open_hour()
    brought = _by_hour(books, pending(node_id), job_id, first)
    kept = _by_hour(books, fees(node_id), job_id, first)
    before = [one for one in _holds(books, job_id, node_id) if one.hour >= first]
    for hour in sorted(brought):
        earlier = [dict(one.legs) for one in before if one.hour == hour]
        share = brought[hour] - sum(legs[held(node_id)] for legs in earlier)
        fee = kept[hour] - sum(legs.get(held_fees(node_id), 0) for legs in earlier)
        if share <= 0:
            continue
        legs = {
            pending(node_id): -share,
            held(node_id): share,
            fees(node_id): -fee,
            held_fees(node_id): fee,
        }
        key = f"{WORK}{job_id}/{node_id}/{hour}/{len(earlier)}"
        post(books, Transfer(key=key, kind=Kind.HOLD, legs=legs_of(legs), at=at, job_id=job_id, hour=hour))


def decide(books: ObjectionBooks, job_id: str, node_id: str, *, good: bool, at: int) -> int:
    """End the hold of a node's work in a job: all that is held goes on, or back to the trainer with the fee.

    A void takes all with it that is still open to challenge. Returns the micro-credits, the fee included.
    """
    owners = [one.owner for one in books.objections() if (one.key.job_id, one.node_id) == (job_id, node_id)]
    if not owners:
        return 0
    if not good:
        hold_rest(books, job_id, node_id, at=at)
    kind, total = Kind.RELEASE if good else Kind.VOID, 0
    for hold in _undecided(books, job_id, node_id):
        share, fee = _parts(hold, node_id)
        back = payable(node_id) if hold.hour < books.open_hour() else pending(node_id)
        out = {held(node_id): -share, held_fees(node_id): -fee}
        legs = {**out, back: share, fees(node_id): fee} if good else {**out, trainer(owners[0]): share + fee}
        key = f"decision/{hold.key.removeprefix('hold/')}"
        post(books, Transfer(key=key, kind=kind, legs=legs_of(legs), at=at, job_id=job_id, hour=hold.hour))
        total += share + fee
    books.decide_objections(job_id, node_id, kind.value)
    return total


def held_work(books: ObjectionBooks) -> tuple[HeldWork, ...]:
    """What waits for a decision, by job and node."""
    by_work: dict[tuple[JobId, NodeId], list[Objection]] = {}
    for one in books.objections():
        by_work.setdefault((one.key.job_id, one.node_id), []).append(one)
    return tuple(
        HeldWork(
            job_id=job_id,
            node_id=node_id,
            owner=found[0].owner,
            objections=len(found),
            since=min(one.at for one in found),
            micro=sum(sum(_parts(hold, node_id)) for hold in _undecided(books, job_id, node_id)),
        )
        for (job_id, node_id), found in sorted(by_work.items())
    )


def _by_hour(books: MoneyBooks, account: str, job_id: str, first: int) -> Counter[int]:
    sums: Counter[int] = Counter()
    for hour, job, _device, _count, micro in books.unit_sums(account, first):
        if job == job_id:
            sums[hour] += micro
    return sums


def _holds(books: MoneyBooks, job_id: str, node_id: str) -> list[Transfer]:
    found = books.transfers_of(held(node_id))
    return [one for one in found if one.kind is Kind.HOLD and one.job_id == job_id]


def _undecided(books: MoneyBooks, job_id: str, node_id: str) -> list[Transfer]:
    return [
        one
        for one in _holds(books, job_id, node_id)
        if one.key.startswith(WORK) and books.find_transfer(f"decision/{one.key.removeprefix('hold/')}") is None
    ]


def _parts(hold: Transfer, node_id: str) -> tuple[int, int]:
    """The node's share and the fee."""
    legs = dict(hold.legs)
    return legs[held(node_id)], legs.get(held_fees(node_id), 0)
