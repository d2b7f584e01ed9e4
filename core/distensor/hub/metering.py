"""Units of work: claimed by a node, received by the trainer, credited once. Pure.

    (nothing) --claim--> CLAIMED --receipt of the same size--> CREDITED
    (nothing) --receipt--> RECEIVED --claim of the same size--> CREDITED
    either --the other one of another size--> MISMATCHED, credited never

The first claim and the first receipt of a key count; what comes again changes nothing. Units of an earlier epoch are
work that was done before the members changed: they count like all others. A node cannot earn by claiming in an epoch
that is over, because the trainer gives its one receipt for a step in the epoch that committed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distensor.core.control import Earnings, Unit, UnitKey
from distensor.core.errors import ControlError
from distensor.core.ids import Epoch, JobId, NodeId, Rank
from distensor.core.statement import HOUR_SECONDS, UnitState
from distensor.hub.ledger.accounts import MICRO_PER_MICRO_BATCH, Credit, fee_of


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecord:
    """What is known of one unit. `claimed` and `received` are micro-batches."""

    key: UnitKey
    node_id: NodeId
    state: UnitState
    claimed: int | None = None
    received: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Posting:
    """A unit to credit: `amount` micro-credits from the trainer `owner`, of which the node gets all but the fee."""

    key: UnitKey
    owner: str
    node_id: NodeId
    amount: int
    hour: int
    """Of the hub's clock, since 1970 in UTC. Only for sums by time and the challenge window."""
    fee: int = 0

    def as_credit(self) -> Credit:
        return Credit(
            key=self.key,
            trainer=self.owner,
            node_id=self.node_id,
            amount=self.amount,
            fee=self.fee,
            at=self.hour * HOUR_SECONDS,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOfWork:
    """Who may claim and who may receive the units of a rank, and on which terms its job began."""

    owner: str
    node_id: NodeId
    price: int = MICRO_PER_MICRO_BATCH
    """Micro-credits of one micro-batch, the fee within them."""
    fee_per_mille: int = 0


class UnitBooks(Protocol):
    """What metering needs of a transaction."""

    def find_place(self, job_id: JobId, epoch: Epoch, rank: Rank) -> PlaceOfWork | None: ...

    def find_units(self, keys: Iterable[UnitKey]) -> dict[UnitKey, UnitRecord]: ...

    def save_units(self, units: Iterable[UnitRecord]) -> None: ...

    def post(self, postings: Iterable[Posting]) -> None:
        """Credit new units, from the job's escrow, then the trainer's deposit, then the platform."""

    def open_hour(self) -> int:
        """The first hour whose units are not payable yet. It only rises."""

    def earnings(self, node_id: NodeId) -> Earnings: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The result of one batch: the new sums of the nodes concerned, and what was refused and why."""

    earnings: dict[NodeId, Earnings]
    refused: tuple[str, ...] = ()


def record_claims(books: UnitBooks, node_id: NodeId, units: Sequence[Unit], *, hour: int) -> Recorded:
    """Enter a node's claims. One that is not the node's work is refused and the rest is entered."""
    refused: list[str] = []
    entering = _Entering(books, units)
    for unit in units:
        place = books.find_place(unit.key.job_id, unit.key.epoch, unit.key.rank)
        if place is None or place.node_id != node_id:
            refused.append(f"{describe(unit.key)} is no work of node {node_id}")
        else:
            entering.claim(place, unit)
    entering.finish(hour)
    return Recorded(earnings={node_id: books.earnings(node_id)}, refused=tuple(refused))


def record_receipts(books: UnitBooks, owner: str, units: Sequence[Unit], *, hour: int) -> Recorded:
    """Enter a trainer's receipts, all or none.

    Raises:
        ControlError: a unit that was never placed, or of another trainer's job: the words are the same.
    """
    nodes: set[NodeId] = set()
    entering = _Entering(books, units)
    for unit in units:
        place = receivable(books, owner, unit.key)
        entering.receive(place, unit)
        nodes.add(place.node_id)
    entering.finish(hour)
    return Recorded(earnings={node_id: books.earnings(node_id) for node_id in sorted(nodes)})


class Places(Protocol):
    def find_place(self, job_id: JobId, epoch: Epoch, rank: Rank) -> PlaceOfWork | None: ...


def receivable(books: Places, owner: str, key: UnitKey) -> PlaceOfWork:
    """Where a unit of a job of `owner` was placed. Raises ControlError, in the same words for whatever is not."""
    place = books.find_place(key.job_id, key.epoch, key.rank)
    if place is None or place.owner != owner:
        raise ControlError(never_placed(key))
    return place


def never_placed(key: UnitKey) -> str:
    return f"{describe(key)} was never placed"


class _Entering:
    """The units of one batch: read at once, changed here, written at once."""

    def __init__(self, books: UnitBooks, units: Iterable[Unit]) -> None:
        self._books = books
        self._known = books.find_units({unit.key for unit in units})
        self._changed: dict[UnitKey, UnitRecord] = {}
        self._places: dict[UnitKey, PlaceOfWork] = {}

    def claim(self, place: PlaceOfWork, unit: Unit) -> None:
        self._change(place, with_claim(self._known.get(unit.key), unit, place.node_id))

    def receive(self, place: PlaceOfWork, unit: Unit) -> None:
        self._change(place, with_receipt(self._known.get(unit.key), unit, place.node_id))

    def _change(self, place: PlaceOfWork, after: UnitRecord) -> None:
        if after != self._known.get(after.key):
            self._known[after.key] = self._changed[after.key] = after
            self._places[after.key] = place

    def finish(self, hour: int) -> None:
        """Write what has changed. A unit changes into CREDITED once, so it is posted once."""
        changed = self._changed.values()
        if not changed:
            return
        self._books.save_units(changed)
        credited = [unit for unit in changed if unit.state is UnitState.CREDITED]
        if credited:
            hour = max(hour, self._books.open_hour())  # a clock that went back: no hour to come would make it payable
            self._books.post([_posting(self._places[unit.key], unit, hour) for unit in credited])


def _posting(place: PlaceOfWork, unit: UnitRecord, hour: int) -> Posting:
    assert unit.received is not None, "a credited unit has been received"
    amount = unit.received * place.price
    return Posting(
        key=unit.key,
        owner=place.owner,
        node_id=place.node_id,
        amount=amount,
        hour=hour,
        fee=fee_of(amount, place.fee_per_mille),
    )


def with_claim(before: UnitRecord | None, unit: Unit, node_id: NodeId) -> UnitRecord:
    """The unit once its node has claimed it."""
    if before is None:
        return UnitRecord(key=unit.key, node_id=node_id, state=UnitState.CLAIMED, claimed=unit.micro_batches)
    if before.claimed is not None:
        return before
    return _settled(replace(before, claimed=unit.micro_batches))


def with_receipt(before: UnitRecord | None, unit: Unit, node_id: NodeId) -> UnitRecord:
    """The unit once its trainer has received it."""
    if before is None:
        return UnitRecord(key=unit.key, node_id=node_id, state=UnitState.RECEIVED, received=unit.micro_batches)
    if before.received is not None:
        return before
    return _settled(replace(before, received=unit.micro_batches))


def _settled(unit: UnitRecord) -> UnitRecord:
    agree = unit.claimed == unit.received
    return replace(unit, state=UnitState.CREDITED if agree else UnitState.MISMATCHED)


def describe(key: UnitKey) -> str:
    return f"unit (job {key.job_id}, epoch {key.epoch}, step {key.step}, rank {key.rank})"
