"""One transaction on the hub's books, in either database."""

from __future__ import annotations

from distensor.hub.repository import Snapshot
from distensor.hub.stores.access_rows import AccessRows
from distensor.hub.stores.job_rows import JobRows
from distensor.hub.stores.ledger_rows import LedgerRows
from distensor.hub.stores.node_rows import NodeRows
from distensor.hub.stores.objection_rows import ObjectionRows
from distensor.hub.stores.unit_rows import UnitRows


class SqlBooks(NodeRows, JobRows, UnitRows, LedgerRows, ObjectionRows, AccessRows):
    """A `repository.Books`."""

    def snapshot(self) -> Snapshot:
        nodes = self.nodes()
        return Snapshot(
            nodes=nodes,
            jobs=self.recent_jobs(),
            submissions=self.submissions(),
            earnings={node.node_id: self.earnings(node.node_id) for node in nodes},
        )
