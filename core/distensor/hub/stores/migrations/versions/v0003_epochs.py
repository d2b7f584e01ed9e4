"""Further epochs of a running job."""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import carry_out, tables

revision = "0003"
down_revision = "0002"

UP = tables(
    "ALTER TABLE jobs ADD COLUMN request TEXT NOT NULL DEFAULT ''; ALTER TABLE ranks ADD COLUMN continues INTEGER"
)
DOWN = tables("ALTER TABLE ranks DROP COLUMN continues; ALTER TABLE jobs DROP COLUMN request")


def upgrade() -> None:
    carry_out(UP)


def downgrade() -> None:
    carry_out(DOWN)
