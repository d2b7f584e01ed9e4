"""A node's own account, read page by page."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

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
from distensor.hub.metering import node_account

Run = Callable[..., sqlite3.Cursor]
"""`execute` of the connection."""

_ROWS = """
SELECT hour, job_id, epoch, rank, device_id, entries, amount
FROM hourly JOIN ranks USING (job_id, epoch, rank)
WHERE account = ? AND hour >= ? AND (hour, job_id, epoch, rank) > (?, ?, ?, ?)
ORDER BY hour, job_id, epoch, rank LIMIT ?
"""

_UNITS = """
SELECT step, state, claimed, received, coalesce((
    SELECT amount FROM entries WHERE entries.job_id = units.job_id AND entries.epoch = units.epoch
    AND entries.step = units.step AND entries.rank = units.rank AND account = ?
), 0)
FROM units WHERE job_id = ? AND epoch = ? AND step >= ? AND rank = ? AND node_id = ? ORDER BY step LIMIT ?
"""


def statement(run: Run, node_id: NodeId, query: StatementQuery, earnings: Earnings) -> Statement:
    """One page of what the node was credited."""
    after = query.after
    cursor = (-1, "", 0, 0) if after is None else (after.hour, after.job_id, after.epoch, after.rank)
    found = run(_ROWS, (node_account(node_id), query.since_hour, *cursor, query.most + 1)).fetchall()
    rows = tuple(
        StatementRow(
            key=RowKey(hour=hour, job_id=JobId(job_id), epoch=Epoch(epoch), rank=Rank(rank)),
            device_id=DeviceId(device_id),
            units=entries,
            micro=amount,
        )
        for hour, job_id, epoch, rank, device_id, entries, amount in found[: query.most]
    )
    return Statement(rows=rows, more=len(found) > query.most, earnings=earnings)


def units_page(run: Run, node_id: NodeId, query: UnitsQuery) -> UnitsPage:
    """One page of the units that are the node's."""
    where = (query.job_id, query.epoch, query.from_step, query.rank, node_id)
    found = run(_UNITS, (node_account(node_id), *where, query.most + 1)).fetchall()
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
