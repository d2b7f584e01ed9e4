"""Units to which a trainer objects: others computed something else."""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import carry_out, tables

revision = "0006"
down_revision = "0005"

UP = tables(
    """
CREATE TABLE objections (
    job_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    node_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    at INTEGER NOT NULL,
    decision TEXT NOT NULL,
    PRIMARY KEY (job_id, epoch, step, rank)
) STRICT, WITHOUT ROWID;

CREATE INDEX objections_by_decision ON objections (decision)
"""
)
DOWN = tables("DROP TABLE objections")


def upgrade() -> None:
    carry_out(UP)


def downgrade() -> None:
    carry_out(DOWN)
