"""The hub's books in one SQLite file: WAL, synchronous FULL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from distensor.core.errors import BooksRefusedError, StoreError
from distensor.hub.stores.books import SqlBooks
from distensor.hub.stores.engine import Result, Row, Table
from distensor.hub.stores.migrations.ddl import Dialect
from distensor.hub.stores.migrations.upgrade import (
    KNOWN,
    NEWEST,
    first_statements,
    migrate,
    number_of,
    require_known,
)

WAIT_SECONDS = 5.0
"""For another process that writes: `distensor hub token`."""


class SqliteEngine:
    """An `Engine` on a connection of sqlite3."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.run: Any = connection.execute
        self._many = connection.executemany

    def insert(self, table: Table, rows: Sequence[Row], otherwise: str = "") -> None:
        self._many(_insert_text(table, otherwise), rows)

    def pick(self, table: Table, keys: Sequence[Row]) -> list[Any]:
        text = _pick_text(table)
        return [row for key in keys if (row := self.run(text, key).fetchone()) is not None]

    def lock_ledger(self) -> None:
        """A transaction that writes has the whole file."""


@cache
def _insert_text(table: Table, otherwise: str) -> str:
    marks = ", ".join("?" * len(table.columns))
    return f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({marks}) {otherwise}"


@cache
def _pick_text(table: Table) -> str:
    where = " AND ".join(f"{column} = ?" for column in table.key_columns)
    return f"SELECT {', '.join(table.columns)} FROM {table.name} WHERE {where}"


class SqliteStore:
    """A `repository.Store`. One connection that writes, and one for readers; each used by one thread at a time.

    Raises:
        StoreError: the file cannot be opened or is of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = connect(path)
            prepare(self._connection, path, NEWEST)
            self._reading = _reader(path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"database {path}: {error}") from error

    @contextmanager
    def transaction(self) -> Iterator[SqlBooks]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield SqlBooks(SqliteEngine(self._connection))
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back("ROLLBACK")
            raise self._error(error) from error
        except BaseException:  # whatever it was, nothing of it stays; it goes on upwards
            self._roll_back("ROLLBACK")
            raise

    def _error(self, error: sqlite3.Error) -> StoreError:
        """OperationalError is the disk's or a lock's; all others are what the books refuse, today and tomorrow."""
        kind = StoreError if isinstance(error, sqlite3.OperationalError) else BooksRefusedError
        return kind(f"database {self._path}: {error}")

    @contextmanager
    def part(self) -> Iterator[None]:
        self._connection.execute("SAVEPOINT part")
        try:
            yield
        except sqlite3.OperationalError as error:  # the disk, not the caller's data: the whole group fails
            raise StoreError(f"database {self._path}: {error}") from error
        except BaseException:  # whatever it was, nothing of the part stays; it goes on upwards
            self._roll_back("ROLLBACK TO part")
            self._connection.execute("RELEASE part")
            raise
        self._connection.execute("RELEASE part")

    def _roll_back(self, statement: str) -> None:
        if self._connection.in_transaction:
            self._connection.execute(statement)

    @contextmanager
    def reading(self) -> Iterator[SqlBooks]:
        try:
            self._reading.execute("BEGIN")
            try:
                yield SqlBooks(SqliteEngine(self._reading))
            finally:
                self._reading.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreError(f"database {self._path}: {error}") from error

    def give_up(self) -> None:
        """A file is there or not; nothing is waited for."""

    def close(self) -> None:
        self._reading.close()
        self._connection.close()


def connect(path: Path) -> sqlite3.Connection:
    """A connection that commits to the disk, on a file that only its owner may read."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=WAIT_SECONDS)
    path.chmod(0o600)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _reader(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=WAIT_SECONDS)
    connection.execute("PRAGMA query_only = ON")
    return connection


def prepare(connection: sqlite3.Connection, path: Path, wanted: str) -> None:
    """Make the tables, or lead them to the wanted version, all in one transaction.

    Raises:
        StoreError: the database is of a newer version than this program knows.
    """
    present, says_it = version_of(connection, path)
    if present is None:
        with _at_once(connection):
            present, says_it = version_of(connection, path)  # again: another process may have been faster
            if present is None:
                for statement in first_statements(Dialect.SQLITE, wanted):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number_of(wanted)}")
                return
    if (present, says_it) != (wanted, True):
        _migrate(connection, path, wanted)


@contextmanager
def _at_once(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:  # whatever it was, the tables stay as they were; it goes on upwards
        connection.rollback()
        raise
    connection.commit()


def version_of(connection: sqlite3.Connection, path: Path) -> tuple[str | None, bool]:
    """The version of the tables, None where there are none, and whether alembic's table says it."""
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    if number > len(KNOWN):
        require_known(str(number), str(path))
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone() is None:
        return (KNOWN[number - 1] if number else None), False
    (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    require_known(revision, str(path))
    return revision, True


def _migrate(connection: sqlite3.Connection, path: Path, wanted: str) -> None:
    import sqlalchemy  # see migrations.ddl.carry_out
    from sqlalchemy.pool import StaticPool

    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    with engine.connect() as session, session.begin():
        session.exec_driver_sql("BEGIN IMMEDIATE")
        present, says_it = version_of(connection, path)
        assert present is not None, "there were tables a moment ago, and nothing drops them"
        migrate(session, present, wanted, stamp=not says_it)
        session.exec_driver_sql(f"PRAGMA user_version = {number_of(wanted)}")


def integrity(path: Path) -> list[str]:
    """What SQLite finds wrong with a file; empty when nothing is."""
    with closing(_reader(path)) as connection:
        found: Result = connection.execute("PRAGMA integrity_check")
        return [line for (line,) in found if line != "ok"]
