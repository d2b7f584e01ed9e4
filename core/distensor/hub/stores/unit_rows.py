"""Units of work, and a node's own account, read page by page."""

from __future__ import annotations

from collections.abc import Iterable

from distensor.core.control import Earnings, UnitKey
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank
from distensor.core.statement import (
    HubUnit,
    RowKey,
    Statement,
    StatementQuery,
    StatementRow,
    UnitsPage,
    UnitsQuery,
    UnitState,
)
from distensor.hub.ledger.accounts import pending
from distensor.hub.ledger_queries import node_money
from distensor.hub.metering import PlaceOfWork, UnitRecord
from distensor.hub.stores.engine import Engine, Table
from distensor.hub.stores.ledger_rows import LedgerRows

_UNITS = Table(
    name="units",
    columns=("job_id", "epoch", "step", "rank", "node_id", "state", "claimed", "received"),
    texts=frozenset({"job_id", "node_id", "state"}),
    key=4,
)
_NEWS = (
    "ON CONFLICT (job_id, epoch, step, rank) DO UPDATE SET state = excluded.state, claimed = excluded.claimed, "
    "received = excluded.received"
)
_PAGE_OF_ROWS = """
SELECT hour, job_id, epoch, rank, device_id, entries, amount
FROM hourly JOIN ranks USING (job_id, epoch, rank)
WHERE account = ? AND hour >= ? AND (hour, job_id, epoch, rank) > (?, ?, ?, ?)
ORDER BY hour, job_id, epoch, rank LIMIT ?
"""
_PAGE_OF_UNITS = """
SELECT step, state, claimed, received, coalesce((
    SELECT amount FROM entries WHERE entries.job_id = units.job_id AND entries.epoch = units.epoch
    AND entries.step = units.step AND entries.rank = units.rank AND account = ?
), 0)
FROM units WHERE job_id = ? AND epoch = ? AND step >= ? AND rank = ? AND node_id = ? ORDER BY step LIMIT ?
"""


class UnitRows(LedgerRows):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._places: dict[tuple[JobId, Epoch, Rank], PlaceOfWork] = {}

    def find_place(self, job_id: JobId, epoch: Epoch, rank: Rank) -> PlaceOfWork | None:
        key = (job_id, epoch, rank)
        if key not in self._places:
            row = self._run(
                "SELECT jobs.owner, ranks.node_id, jobs.price, jobs.fee FROM ranks JOIN jobs USING (job_id) "
                "WHERE ranks.job_id = ? AND ranks.epoch = ? AND ranks.rank = ?",
                key,
            ).fetchone()
            if row is None:
                return None
            owner, node_id, price, fee = row
            self._places[key] = PlaceOfWork(owner=owner, node_id=NodeId(node_id), price=price, fee_per_mille=fee)
        return self._places[key]

    def find_units(self, keys: Iterable[UnitKey]) -> dict[UnitKey, UnitRecord]:
        found = (_unit(*row) for row in self._engine.pick(_UNITS, [_columns(key) for key in keys]))
        return {unit.key: unit for unit in found}

    def save_units(self, units: Iterable[UnitRecord]) -> None:
        rows = [(*_columns(one.key), one.node_id, one.state.value, one.claimed, one.received) for one in units]
        self._engine.insert(_UNITS, rows, _NEWS)

    def earnings(self, node_id: NodeId) -> Earnings:
        row = self._run("SELECT amount, entries FROM balances WHERE account = ?", (pending(node_id),)).fetchone()
        (open_units,) = self._run(
            "SELECT count(*) FROM units WHERE node_id = ? AND state = 'claimed'", (node_id,)
        ).fetchone()
        amount, units = row or (0, 0)
        return Earnings(confirmed_micro=amount, confirmed_units=units, pending_units=open_units)

    def statement(self, node_id: NodeId, query: StatementQuery) -> Statement:
        """One page of what the node was credited."""
        after = query.after
        cursor = (-1, "", 0, 0) if after is None else (after.hour, after.job_id, after.epoch, after.rank)
        values = (pending(node_id), query.since_hour, *cursor, query.most + 1)
        found = self._run(_PAGE_OF_ROWS, values).fetchall()
        rows = tuple(
            StatementRow(
                key=RowKey(hour=hour, job_id=JobId(job_id), epoch=Epoch(epoch), rank=Rank(rank)),
                device_id=DeviceId(device_id),
                units=entries,
                micro=amount,
            )
            for hour, job_id, epoch, rank, device_id, entries, amount in found[: query.most]
        )
        return Statement(
            rows=rows,
            more=len(found) > query.most,
            earnings=self.earnings(node_id),
            money=node_money(self, node_id),
        )

    def units(self, node_id: NodeId, query: UnitsQuery) -> UnitsPage:
        """One page of the units that are the node's."""
        where = (query.job_id, query.epoch, query.from_step, query.rank, node_id)
        found = self._run(_PAGE_OF_UNITS, (pending(node_id), *where, query.most + 1)).fetchall()
        units = tuple(
            HubUnit(
                key=UnitKey(job_id=query.job_id, epoch=query.epoch, step=step, rank=query.rank),
                state=UnitState(state),
                claimed=claimed,
                received=received,
                micro=micro,
            )
            for step, state, claimed, received, micro in found[: query.most]
        )
        return UnitsPage(units=units, more=len(found) > query.most)


def _columns(key: UnitKey) -> tuple[str, int, int, int]:
    return key.job_id, key.epoch, key.step, key.rank


def _unit(
    job_id: str, epoch: int, step: int, rank: int, node_id: str, state: str, claimed: int | None, received: int | None
) -> UnitRecord:
    return UnitRecord(
        key=UnitKey(job_id=JobId(job_id), epoch=Epoch(epoch), step=step, rank=Rank(rank)),
        node_id=NodeId(node_id),
        state=UnitState(state),
        claimed=claimed,
        received=received,
    )
