"""The ledger of deposits, escrow and payouts: transfers beside those of single units, and the operator's terms.

`entries` stay the transfers of units, and `balances` the sums of them. What else moves is in `transfers` and `legs`,
with sums in `moved`; an account has what both say. Until now a unit went from `trainer:NAME` to `node:NODE`: the latter
are the nodes' pending credits, and the former is what the platform has lent.
"""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import (
    carry_out,
    functions_gone,
    no_truncate,
    refusal,
    sums,
    tables,
    together,
    without,
)

revision = "0005"
down_revision = "0004"

_FINAL = "the ledger is append-only"
_ENTRIES_ARE_FINAL = refusal("entries_are_final", "entries", "UPDATE", _FINAL)


def _renamed(old: str, new: str) -> str:
    return "; ".join(
        f"UPDATE {table} SET account = '{new}:' || substr(account, {len(old) + 2}) "
        f"WHERE substr(account, 1, {len(old) + 1}) = '{old}:'"
        for table in ("entries", "balances", "hourly")
    )


UP = together(
    without("entries", "entries_are_final"),
    tables(_renamed("node", "pending")),
    _ENTRIES_ARE_FINAL,
    tables(
        """
ALTER TABLE jobs ADD COLUMN price INTEGER NOT NULL DEFAULT 1000;

ALTER TABLE jobs ADD COLUMN fee INTEGER NOT NULL DEFAULT 0;

CREATE TABLE transfers (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    at INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    device TEXT NOT NULL,
    hour INTEGER NOT NULL
) STRICT;

CREATE INDEX transfers_by_kind ON transfers (kind, hour);

CREATE TABLE legs (
    key TEXT NOT NULL REFERENCES transfers (key),
    account TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount <> 0),
    PRIMARY KEY (key, account)
) STRICT, WITHOUT ROWID;

CREATE INDEX legs_of_accounts ON legs (account);

CREATE TABLE moved (account TEXT PRIMARY KEY, amount INTEGER NOT NULL, entries INTEGER NOT NULL) STRICT;

CREATE TABLE terms (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;

CREATE INDEX hourly_by_hour ON hourly (hour);

CREATE INDEX hourly_by_job ON hourly (job_id);

CREATE INDEX nodes_of_accounts ON nodes (account)
"""
    ),
    sums("legs_change_moved", "legs", "moved", ("account",)),
    tables(
        """
INSERT INTO transfers (key, kind, at, job_id, device, hour)
SELECT 'lent/' || account, 'lent', 0, '', '', 0 FROM balances WHERE amount < 0 AND account <> 'platform';

INSERT INTO legs (key, account, amount)
SELECT 'lent/' || account, account, -amount FROM balances WHERE amount < 0 AND account <> 'platform' ORDER BY account;

INSERT INTO legs (key, account, amount)
SELECT 'lent/' || account, 'platform', amount FROM balances WHERE amount < 0 AND account <> 'platform' ORDER BY account
"""
    ),
    refusal("transfers_are_final", "transfers", "UPDATE", _FINAL),
    refusal("transfers_stay", "transfers", "DELETE", _FINAL),
    no_truncate("transfers_stay_all", "transfers", _FINAL),
    refusal("legs_are_final", "legs", "UPDATE", _FINAL),
    refusal("legs_stay", "legs", "DELETE", _FINAL),
    no_truncate("legs_stay_all", "legs", _FINAL),
)
DOWN = together(
    tables(
        """
DELETE FROM meta WHERE key = 'open_hour';

DROP INDEX nodes_of_accounts;

DROP INDEX hourly_by_job;

DROP INDEX hourly_by_hour;

DROP TABLE terms;

DROP TABLE moved;

DROP TABLE legs;

DROP TABLE transfers;

ALTER TABLE jobs DROP COLUMN fee;

ALTER TABLE jobs DROP COLUMN price
"""
    ),
    functions_gone("legs_change_moved"),
    without("entries", "entries_are_final"),
    tables(_renamed("pending", "node")),
    _ENTRIES_ARE_FINAL,
)


def upgrade() -> None:
    carry_out(UP)


def downgrade() -> None:
    carry_out(DOWN)
