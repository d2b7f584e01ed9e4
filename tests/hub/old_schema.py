"""The tables as hubs made them before there was alembic, frozen: version 3 is what is installed out there."""

from __future__ import annotations

_FIRST = """
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

CREATE TRIGGER jobs_epoch_never_falls BEFORE UPDATE OF epoch ON jobs WHEN NEW.epoch < OLD.epoch
BEGIN SELECT RAISE(ABORT, 'the epoch of a job never falls'); END;

CREATE TRIGGER meta_never_falls BEFORE UPDATE ON meta WHEN NEW.value < OLD.value
BEGIN SELECT RAISE(ABORT, 'the generation never falls'); END;

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

-- The ledger. Every unit is posted once: two entries, one of them negative. Nothing is ever changed or removed.
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

CREATE TABLE balances (account TEXT PRIMARY KEY, amount INTEGER NOT NULL, entries INTEGER NOT NULL) STRICT;

CREATE TRIGGER entries_are_final BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER entries_stay BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TRIGGER entries_change_balances AFTER INSERT ON entries
BEGIN
    INSERT INTO balances VALUES (NEW.account, NEW.amount, 1)
    ON CONFLICT (account) DO UPDATE SET amount = amount + excluded.amount, entries = entries + 1;
END;
"""

# Version 2: what was posted when. Hour 0 holds what was posted before.
_HOURS = """
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
GROUP BY account, job_id, epoch, rank;

CREATE TRIGGER entries_change_hours AFTER INSERT ON entries
BEGIN
    INSERT INTO hourly VALUES (NEW.account, NEW.hour, NEW.job_id, NEW.epoch, NEW.rank, NEW.amount, 1)
    ON CONFLICT (account, hour, job_id, epoch, rank)
    DO UPDATE SET amount = amount + excluded.amount, entries = entries + 1;
END;
"""

# Version 3: further epochs of a running job.
_EPOCHS = """
ALTER TABLE jobs ADD COLUMN request TEXT NOT NULL DEFAULT '';
ALTER TABLE ranks ADD COLUMN continues INTEGER;
"""

UPGRADES = (_FIRST, _HOURS, _EPOCHS)
"""UPGRADES[n] leads from version n to n + 1."""
SCHEMA_VERSION = len(UPGRADES)
