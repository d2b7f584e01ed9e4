"""Accounts, keys, the audit log; whose a node and a token are; what a job waits for, and why its ranks are where they
are.

What was there before belongs to the account `main`. Keys keep their hash, kind and account for ever; lines of the audit
log are added and never changed.
"""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import carry_out, no_truncate, refusal, tables, together

revision = "0004"
down_revision = "0003"

_FINAL = "the audit log is append-only"

UP = together(
    tables(
        """
CREATE TABLE accounts (
    account_id TEXT PRIMARY KEY,
    kinds TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    disabled INTEGER NOT NULL,
    most_workers INTEGER,
    most_waiting INTEGER,
    priority INTEGER NOT NULL
) STRICT;

CREATE TABLE keys (
    number INTEGER PRIMARY KEY,
    key_id TEXT NOT NULL UNIQUE,
    family TEXT NOT NULL,
    secret_hash TEXT NOT NULL UNIQUE,
    shown TEXT NOT NULL,
    kind TEXT NOT NULL,
    account_id TEXT NOT NULL REFERENCES accounts (account_id),
    scopes TEXT NOT NULL,
    label TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    last_used_at INTEGER,
    replaced_by TEXT
) STRICT;

CREATE INDEX keys_of_accounts ON keys (account_id);

CREATE INDEX keys_revoked ON keys (key_id) WHERE revoked_at IS NOT NULL;

CREATE TABLE audit (
    number INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    outcome TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;

ALTER TABLE tokens ADD COLUMN account TEXT NOT NULL DEFAULT 'main';

ALTER TABLE nodes ADD COLUMN account TEXT NOT NULL DEFAULT 'main';

ALTER TABLE nodes ADD COLUMN joined_by TEXT;

ALTER TABLE jobs ADD COLUMN wish TEXT;

ALTER TABLE jobs ADD COLUMN placement TEXT NOT NULL DEFAULT ''
"""
    ),
    refusal("audit_is_final", "audit", "UPDATE", _FINAL),
    refusal("audit_stays", "audit", "DELETE", _FINAL),
    no_truncate("audit_is_not_emptied", "audit", _FINAL),
)
DOWN = tables(
    """
ALTER TABLE jobs DROP COLUMN placement;

ALTER TABLE jobs DROP COLUMN wish;

ALTER TABLE nodes DROP COLUMN joined_by;

ALTER TABLE nodes DROP COLUMN account;

ALTER TABLE tokens DROP COLUMN account;

DELETE FROM meta WHERE key = 'access';

DROP TABLE audit;

DROP TABLE keys;

DROP TABLE accounts
"""
)


def upgrade() -> None:
    carry_out(UP)


def downgrade() -> None:
    carry_out(DOWN)
