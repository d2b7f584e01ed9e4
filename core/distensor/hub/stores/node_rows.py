"""Generation, tokens and nodes."""

from __future__ import annotations

from distensor.core.control import NodeInfo
from distensor.core.ids import AccountId, Generation, KeyId, NodeId
from distensor.hub.record_json import info_from_json, info_to_json
from distensor.hub.records import NodeRecord, TokenRecord
from distensor.hub.stores.rows import Rows


class NodeRows(Rows):
    def begin_generation(self) -> Generation:
        row = self._run(
            "INSERT INTO meta (key, value) VALUES ('generation', 1) "
            "ON CONFLICT (key) DO UPDATE SET value = meta.value + 1 RETURNING value"
        ).fetchone()
        return Generation(row[0])

    def authority_mark(self) -> int | None:
        row = self._run("SELECT value FROM meta WHERE key = 'authority'").fetchone()
        return None if row is None else int(row[0])

    def save_authority_mark(self, mark: int) -> None:
        self._run("INSERT INTO meta (key, value) VALUES ('authority', ?) ON CONFLICT (key) DO NOTHING", (mark,))

    def nodes(self) -> tuple[NodeRecord, ...]:
        """All that ever joined."""
        return tuple(
            NodeRecord(
                node_id=NodeId(node_id),
                secret_hash=secret_hash,
                info=info_from_json(info),
                account=AccountId(account),
                joined_by=None if joined_by is None else KeyId(joined_by),
            )
            for node_id, secret_hash, info, account, joined_by in self._run(
                "SELECT node_id, secret_hash, info, account, joined_by FROM nodes ORDER BY node_id"
            )
        )

    def find_token(self, secret_hash: str) -> TokenRecord | None:
        row = self._run(
            "SELECT role, subject, used_by, spent, account FROM tokens WHERE secret_hash = ?", (secret_hash,)
        ).fetchone()
        if row is None:
            return None
        role, subject, used_by, spent, account = row
        used = None if used_by is None else NodeId(used_by)
        return TokenRecord(
            secret_hash=secret_hash,
            role=role,
            subject=subject,
            used_by=used,
            spent=bool(spent),
            account=AccountId(account),
        )

    def save_token(self, token: TokenRecord) -> None:
        self._run(
            "INSERT INTO tokens (secret_hash, role, subject, used_by, spent, account) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (secret_hash) DO UPDATE SET used_by = excluded.used_by, spent = excluded.spent",
            (token.secret_hash, token.role, token.subject, token.used_by, int(token.spent), token.account),
        )

    def spend_token(self, node_id: NodeId) -> None:
        self._run("UPDATE tokens SET spent = 1 WHERE used_by = ? AND spent = 0", (node_id,))

    def save_node(self, node: NodeRecord) -> None:
        self._run(
            "INSERT INTO nodes (node_id, secret_hash, info, account, joined_by) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (node_id) DO UPDATE SET secret_hash = excluded.secret_hash, info = excluded.info, "
            "account = excluded.account, joined_by = excluded.joined_by",
            (node.node_id, node.secret_hash, info_to_json(node.info), node.account, node.joined_by),
        )

    def save_info(self, node_id: NodeId, info: NodeInfo) -> None:
        self._run("UPDATE nodes SET info = ? WHERE node_id = ?", (info_to_json(info), node_id))
