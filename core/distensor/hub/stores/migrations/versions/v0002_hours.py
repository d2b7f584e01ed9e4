"""What was posted when. Hour 0 holds what was posted before this version."""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import carry_out, sums, tables, together, without

revision = "0002"
down_revision = "0001"

UP = together(
    tables(
        """
ALTER TABLE entries ADD COLUMN hour INTEGER NOT NULL DEFAULT 0;

CREATE TABLE hourly (
    account TEXT NOT NULL,
    hour INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    amount INTEGER NOT NULL,
    entries INTEGER NOT NULL,
    PRIMARY KEY (account, hour, job_id, epoch, rank)
) STRICT, WITHOUT ROWID;

INSERT INTO hourly SELECT account, 0, job_id, epoch, rank, sum(amount), count(*) FROM entries
GROUP BY account, job_id, epoch, rank
"""
    ),
    sums("entries_change_hours", "entries", "hourly", ("account", "hour", "job_id", "epoch", "rank")),
)

DOWN = together(
    without("entries", "entries_change_hours", functions=("entries_change_hours",)),
    tables("DROP TABLE hourly; ALTER TABLE entries DROP COLUMN hour"),
)


def upgrade() -> None:
    carry_out(UP)


def downgrade() -> None:
    carry_out(DOWN)
