"""Nodes, tokens, jobs, ranks, units, and the ledger.

Every unit is posted once: two entries, one of them negative. Nothing of the ledger is ever changed or removed.
"""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import (
    carry_out,
    functions_gone,
    no_truncate,
    refusal,
    refuser,
    sums,
    tables,
    together,
)

revision = "0001"
down_revision = None

_FINAL = "the ledger is append-only"

UP = together(
    refuser(),
    tables(
        """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;

CREATE TABLE tokens (
    secret_hash TEXT PRIMARY KEY,
    role TEXT NOT NULL CHECK (role IN ('node', 'trainer')),
    subject TEXT NOT NULL,
    used_by TEXT,
    spent INTEGER NOT NULL
) STRICT;

CREATE INDEX tokens_used_by ON tokens (used_by);

CREATE TABLE nodes (
    node_id TEXT PRIMARY KEY,
    secret_hash TEXT NOT NULL UNIQUE,
    info TEXT NOT NULL
) STRICT;

CREATE TABLE jobs (
    number INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    submission TEXT NOT NULL,
    name TEXT NOT NULL,
    parallel TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL,
    driver_certificate TEXT NOT NULL,
    reason TEXT NOT NULL,
    UNIQUE (owner, submission)
) STRICT;

CREATE TABLE ranks (
    job_id TEXT NOT NULL REFERENCES jobs (job_id),
    epoch INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    node_id TEXT NOT NULL REFERENCES nodes (node_id),
    device_id TEXT NOT NULL,
    worker_id TEXT NOT NULL,
    port INTEGER,
    certificate TEXT NOT NULL,
    state TEXT,
    restarts INTEGER NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (job_id, epoch, rank)
) STRICT, WITHOUT ROWID;

CREATE TABLE units (
    job_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    node_id TEXT NOT NULL REFERENCES nodes (node_id),
    state TEXT NOT NULL,
    claimed INTEGER,
    received INTEGER,
    PRIMARY KEY (job_id, epoch, step, rank),
    FOREIGN KEY (job_id, epoch, rank) REFERENCES ranks (job_id, epoch, rank)
) STRICT, WITHOUT ROWID;

CREATE INDEX units_pending ON units (node_id) WHERE state = 'claimed';

CREATE TABLE entries (
    entry_id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    account TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount <> 0),
    UNIQUE (job_id, epoch, step, rank, account)
) STRICT;

CREATE TABLE balances (account TEXT PRIMARY KEY, amount INTEGER NOT NULL, entries INTEGER NOT NULL) STRICT
"""
    ),
    refusal("jobs_epoch_never_falls", "jobs", "UPDATE OF epoch", "the epoch of a job never falls",
            when="NEW.epoch < OLD.epoch"),
    refusal("meta_never_falls", "meta", "UPDATE", "the generation never falls", when="NEW.value < OLD.value"),
    refusal("entries_are_final", "entries", "UPDATE", _FINAL),
    refusal("entries_stay", "entries", "DELETE", _FINAL),
    no_truncate("entries_stay_all", "entries", _FINAL),
    sums("entries_change_balances", "entries", "balances", ("account",)),
)  # fmt: skip

DOWN = together(
    tables(
        """
DROP TABLE balances;
DROP TABLE entries;
DROP TABLE units;
DROP TABLE ranks;
DROP TABLE jobs;
DROP TABLE nodes;
DROP TABLE tokens;
DROP TABLE meta
"""
    ),
    functions_gone("entries_change_balances", "refuse"),
)


def upgrade() -> None:
    carry_out(UP)


def downgrade() -> None:
    carry_out(DOWN)
