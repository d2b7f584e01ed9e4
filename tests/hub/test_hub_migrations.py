"""Old databases open, with all that is in them; versions lead up and back down; new ones are the same as old ones."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from old_schema import UPGRADES
from postgres_kit import PostgresServer
from test_hub_metering import JOB, NODES, claim, earned, fill, receive, unit

from distensor.core.errors import StoreError
from distensor.core.statement import StatementQuery
from distensor.hub.repository import Store
from distensor.hub.stores import postgres as in_postgres
from distensor.hub.stores import sqlite as in_sqlite
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.migrations.upgrade import KNOWN, NEWEST
from distensor.hub.stores.migrations.versions import VERSIONS
from distensor.hub.stores.postgres import PostgresStore
from distensor.hub.stores.sqlite import SqliteStore

SAMPLE = (
    "INSERT INTO meta (key, value) VALUES ('generation', 7)",
    "INSERT INTO tokens (secret_hash, role, subject, used_by, spent) VALUES ('h', 'node', 'node', 'n_a', 1)",
    *(f"INSERT INTO nodes (node_id, secret_hash, info) VALUES ('{node}', '{node}', "
      '\'{"name":"atlas","host":"h","version":"1","devices":[],"node_id":"' + node + "\"}')" for node in NODES),
    "INSERT INTO jobs (job_id, owner, submission, name, parallel, epoch, state, driver_certificate, reason) "
    "VALUES ('j_1', 'main', 's', 'job', '{}', 2, 'running', 'pem', '')",
    *("INSERT INTO ranks (job_id, epoch, rank, node_id, device_id, worker_id, port, certificate, state, restarts, "
      f"reason) VALUES ('j_1', 2, {rank}, '{node}', 'cpu', 'w', NULL, '', NULL, 0, '')"
      for rank, node in enumerate(NODES)),
    "INSERT INTO units (job_id, epoch, step, rank, node_id, state, claimed, received) "
    "VALUES ('j_1', 2, 0, 0, 'n_a', 'credited', 4, 4)",
    *(f"INSERT INTO entries (job_id, epoch, step, rank, account, amount) VALUES ('j_1', 2, 0, 0, '{account}', {amount})"
      for account, amount in (("trainer:main", -4000), ("node:n_a", 4000))),
)  # fmt: skip
"""What a hub of the first version may have written; all later versions have these columns too."""
FIRST, OLD = "0001", "0003"


def by_old_hub(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        for script in UPGRADES[:version]:
            old.executescript(script)
        for statement in SAMPLE:
            old.execute(statement)
        old.execute(f"PRAGMA user_version = {version}")


def check_sample(store: Store) -> None:
    """All of the sample is there, and work goes on: the unit is not credited again, the next one is."""
    with store.transaction() as books:
        snapshot = books.snapshot()
        token = books.find_token("h")
        assert books.begin_generation() == 8
        statement = books.statement(NODES[0], StatementQuery(since_hour=0))
        ours = books.account_balances()
    assert token is not None
    assert token.spent
    assert [node.node_id for node in snapshot.nodes] == list(NODES)
    assert [(job.job_id, job.epoch, job.request, job.ranks[0].continues) for job in snapshot.jobs] == [
        (JOB, 2, "", None)
    ]
    assert snapshot.earnings[NODES[0]].confirmed_micro == 4000
    assert [(row.key.hour, row.micro) for row in statement.rows] == [(0, 4000)]
    assert ours == {"pending:n_a": 4000, "platform": -4000}, "what was credited is what the platform has lent"
    claim(store, unit(0), unit(1))
    receive(store, unit(0), unit(1))
    assert earned(store).confirmed_micro == 8000


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_an_older_hub_opens_with_all_that_is_in_it(tmp_path: Path, version: int) -> None:
    path = tmp_path / "hub.sqlite"
    by_old_hub(path, version)
    with closing(SqliteStore(path)) as store:
        check_sample(store)
    with closing(SqliteStore(path)) as store:
        assert earned(store).confirmed_micro == 8000


class Database:
    """Either of the two, at a version of our choice."""

    def __init__(self, where: Path | DatabaseAddress) -> None:
        self.where = where

    def lead_to(self, revision: str) -> None:
        if isinstance(self.where, Path):
            with closing(in_sqlite.connect(self.where)) as connection:
                in_sqlite.prepare(connection, self.where, revision)
        else:
            with in_postgres.connect(self.where) as connection:
                in_postgres.prepare(connection, str(self.where), revision)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Raises whatever the driver raises; gives the rows of the last one."""
        if isinstance(self.where, Path):
            with closing(in_sqlite.connect(self.where)) as file:
                for statement in statements:
                    rows = file.execute(statement).fetchall()
                return rows
        with in_postgres.connect(self.where) as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def store(self) -> Store:
        if isinstance(self.where, Path):
            return SqliteStore(self.where)
        return PostgresStore(self.where, exclusive=False)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Database:
    return Database(tmp_path / "hub.sqlite" if request.param == "sqlite" else postgres.new_database())


def columns(database: Database) -> set[tuple[Any, ...]]:
    """Tables, columns, triggers and indexes."""
    if isinstance(database.where, Path):
        return set(
            database.execute(
                "SELECT m.type, m.tbl_name, coalesce(c.name, m.name), coalesce(c.type, ''), coalesce(c.pk, 0) "
                "FROM sqlite_master AS m LEFT JOIN pragma_table_info(m.name) AS c WHERE m.name <> 'sqlite_sequence'"
            )
        )
    found = database.execute(
        "SELECT table_name, column_name, data_type, is_nullable, collation_name FROM information_schema.columns "
        "WHERE table_schema = 'public'"
    )
    found += database.execute("SELECT tgname, tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal")
    found += database.execute("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'")
    found += database.execute("SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
    return set(found)


def test_versions_follow_each_other() -> None:
    assert [version.before for version in VERSIONS] == [None, *KNOWN[:-1]]
    assert list(KNOWN) == [f"{number:04}" for number in range(1, len(KNOWN) + 1)]


def test_up_down_and_up_again_with_data(database: Database) -> None:
    database.lead_to(FIRST)
    database.execute(*SAMPLE)
    for revision in (NEWEST, FIRST, OLD, NEWEST):
        database.lead_to(revision)
        assert database.execute("SELECT version_num FROM alembic_version") == [(revision,)]
    with closing(database.store()) as store:
        check_sample(store)


def test_tables_that_were_led_up_are_those_that_are_made_at_once(
    database: Database, tmp_path: Path, postgres: PostgresServer
) -> None:
    database.lead_to(FIRST)
    for revision in KNOWN[1:]:
        database.lead_to(revision)
    at_once = tmp_path / "new.sqlite" if isinstance(database.where, Path) else postgres.new_database()
    new = Database(at_once)
    new.lead_to(NEWEST)
    assert columns(database) == columns(new)


def test_what_came_in_later_versions_survives_a_way_back_to_the_one_before(database: Database) -> None:
    """Credits of any hour stay in the ledger when the sums by the hour are dropped and made again."""
    with closing(database.store()) as store:
        fill(store)
        claim(store, unit(0), hour=5)
        receive(store, unit(0), hour=5)
    database.lead_to(FIRST)
    assert database.execute("SELECT sum(amount), count(*) FROM entries") == [(0, 2)]
    with closing(database.store()) as store:
        assert earned(store).confirmed_micro == 4000


def test_a_migration_that_fails_changes_nothing(database: Database) -> None:
    database.lead_to("0002")
    database.execute(*SAMPLE, "ALTER TABLE ranks ADD COLUMN continues TEXT")  # as no hub would have done
    before = columns(database)
    with pytest.raises(Exception, match="continues"):
        database.lead_to(NEWEST)
    assert columns(database) == before
    assert database.execute("SELECT version_num FROM alembic_version") == [("0002",)]


def test_a_newer_database_is_refused_by_name(database: Database) -> None:
    database.lead_to(NEWEST)
    database.execute("UPDATE alembic_version SET version_num = '0099'")
    with pytest.raises(StoreError, match=rf"version 0099, this hub knows up to {NEWEST}.*newer disTensor"):
        database.store()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE entries SET amount = 1", "append-only"),
        ("DELETE FROM entries", "append-only"),
        ("INSERT INTO entries (job_id, epoch, step, rank, account, amount, hour) "
         "SELECT job_id, epoch, step, rank, account, 5, 0 FROM entries LIMIT 1", "(?i)unique"),
        ("INSERT INTO entries (job_id, epoch, step, rank, account, amount) VALUES ('j', 1, 1, 1, 'a', 0)", "(?i)check"),
        ("UPDATE jobs SET epoch = 1", "never falls"),
        ("UPDATE meta SET value = 0", "never falls"),
        ("INSERT INTO units (job_id, epoch, step, rank, node_id, state, claimed) "
         "VALUES ('j_none', 1, 1, 1, 'n_a', 'claimed', 1)", "(?i)foreign key"),
    ],
)  # fmt: skip
def test_the_database_itself_refuses(database: Database, statement: str, why: str) -> None:
    database.lead_to(NEWEST)
    database.execute(*SAMPLE)
    before = database.execute("SELECT account, amount FROM entries ORDER BY entry_id")
    with pytest.raises(Exception, match=why):
        database.execute(statement)
    assert database.execute("SELECT account, amount FROM entries ORDER BY entry_id") == before
