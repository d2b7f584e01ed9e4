"""What trainers object to."""

from __future__ import annotations

from distensor.core.control import UnitKey
from distensor.core.ids import Epoch, JobId, NodeId, Rank
from distensor.hub.objections import Objection
from distensor.hub.stores.rows import Rows


class ObjectionRows(Rows):
    """The part of an `objections.ObjectionBooks` that is not the ledger's."""

    def save_objection(self, objection: Objection) -> None:
        key = objection.key
        self._run(
            "INSERT INTO objections (job_id, epoch, step, rank, node_id, owner, at, decision) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, '') ON CONFLICT (job_id, epoch, step, rank) DO NOTHING",
            (key.job_id, key.epoch, key.step, key.rank, objection.node_id, objection.owner, objection.at),
        )

    def objections(self) -> list[Objection]:
        rows = self._run(
            "SELECT job_id, epoch, step, rank, node_id, owner, at FROM objections WHERE decision = '' "
            "ORDER BY at, job_id, epoch, step, rank"
        ).fetchall()
        return [
            Objection(
                key=UnitKey(job_id=JobId(job_id), epoch=Epoch(epoch), step=step, rank=Rank(rank)),
                node_id=NodeId(node_id),
                owner=owner,
                at=at,
            )
            for job_id, epoch, step, rank, node_id, owner, at in rows
        ]

    def decide_objections(self, job_id: str, node_id: str, decision: str) -> None:
        self._run(
            "UPDATE objections SET decision = ? WHERE job_id = ? AND node_id = ? AND decision = ''",
            (decision, job_id, node_id),
        )
