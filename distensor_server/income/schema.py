"""The tables of a node's own account."""

from __future__ import annotations

SCHEMA_VERSION = 1

SCHEMA = """
-- Units that are not compacted. `claimed` is NULL for what only the hub knows; `seen` is Unix time.
CREATE TABLE units (
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    step INTEGER NOT NULL,
    claimed INTEGER,
    seen INTEGER NOT NULL,
    standing TEXT NOT NULL,
    hub_state TEXT,
    hub_claimed INTEGER,
    hub_received INTEGER,
    micro INTEGER NOT NULL,
    PRIMARY KEY (job, epoch, rank, step)
) STRICT, WITHOUT ROWID;

CREATE INDEX units_by_standing ON units (standing, seen);

-- Matched units, summed by day (UTC, days since 1970). No unit of the rank up to step `through` comes any more.
CREATE TABLE settled (
    day INTEGER NOT NULL,
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    units INTEGER NOT NULL,
    micro INTEGER NOT NULL,
    through INTEGER NOT NULL,
    PRIMARY KEY (job, epoch, rank, day)
) STRICT, WITHOUT ROWID;

-- What the hub says it credited, by hour since 1970 (UTC). Old hours are put together into days.
CREATE TABLE statement (
    hour INTEGER NOT NULL,
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    device TEXT NOT NULL,
    units INTEGER NOT NULL,
    micro INTEGER NOT NULL,
    PRIMARY KEY (hour, job, epoch, rank)
) STRICT, WITHOUT ROWID;

CREATE TABLE energy (
    hour INTEGER NOT NULL,
    device TEXT NOT NULL,
    source TEXT NOT NULL,
    millijoules INTEGER NOT NULL,
    measured_ms INTEGER NOT NULL,
    work_ms INTEGER NOT NULL,
    PRIMARY KEY (hour, device, source)
) STRICT, WITHOUT ROWID;

-- One row: whose account it is at the hub.
CREATE TABLE owner (one INTEGER PRIMARY KEY CHECK (one = 0), node_id TEXT NOT NULL) STRICT;

CREATE TABLE jobs (job TEXT PRIMARY KEY, name TEXT NOT NULL, seen INTEGER NOT NULL) STRICT, WITHOUT ROWID;
"""
