"""The tables of either database, whole, for backups."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from distensor.core.errors import StoreError
from distensor.hub.stores import sqlite
from distensor.hub.stores.address import Database, DatabaseAddress
from distensor.hub.stores.backup import Archive
from distensor.hub.stores.migrations.upgrade import NEWEST
from distensor.hub.stores.opening import postgres_of


@contextmanager
def _told(where: Database, *kinds: type[Exception]) -> Iterator[None]:
    """What a database says becomes an error of ours."""
    try:
        yield
    except kinds as error:
        raise StoreError(f"database {where}: {str(error).strip()}") from error


class SqliteArchive:
    """An `Archive` of a file. Reads as of one moment, beside a hub that writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            self._connection = sqlite.connect(path)
            self._connection.execute("BEGIN")

    def _told(self) -> AbstractContextManager[None]:
        return _told(self._path, sqlite3.Error, OSError)

    def revision(self) -> str:
        with self._told():
            present, _ = sqlite.version_of(self._connection, self._path)
        if present is None:
            raise StoreError(f"database {self._path} has no tables: no hub has been started on it")
        return present

    def tables(self) -> list[tuple[str, tuple[str, ...]]]:
        with self._told():
            names = self._connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
            ).fetchall()
            return [(name, self._columns(name)) for (name,) in names]

    def _columns(self, table: str) -> tuple[str, ...]:
        rows = self._connection.execute("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))
        return tuple(name for (name,) in rows)

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        with self._told():
            yield from self._connection.execute(f"SELECT {', '.join(columns)} FROM {table}")

    def prepare(self, revision: str) -> None:
        with self._told():
            self._connection.execute("COMMIT")
            if sqlite.version_of(self._connection, self._path)[0] is not None:
                raise StoreError(f"database {self._path} has tables already: a backup is restored into a new one")
            sqlite.prepare(self._connection, self._path, revision)
            self._connection.execute("BEGIN IMMEDIATE")

    def insert(self, table: str, columns: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
        with self._told():
            names = _known(columns, self._columns(table), table)
            marks = ", ".join("?" * len(columns))
            self._connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)

    def finish(self) -> None:
        with self._told():
            self._connection.execute("COMMIT")
            sqlite.prepare(self._connection, self._path, NEWEST)

    def close(self) -> None:
        self._connection.close()


class PostgresArchive:
    """An `Archive` of a database. Reads as of one moment, beside a hub that writes."""

    def __init__(self, address: DatabaseAddress) -> None:
        self._postgres, self._address = postgres_of(address), address
        with self._told():
            self._connection = self._postgres.connect(address)
            self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")

    def _told(self) -> AbstractContextManager[None]:
        return _told(self._address, self._postgres.psycopg.Error)

    def revision(self) -> str:
        with self._told():
            present: str | None = self._postgres.version_of(self._connection, str(self._address))
        if present is None:
            raise StoreError(f"database {self._address} has no tables: no hub has been started on it")
        return present

    def tables(self) -> list[tuple[str, tuple[str, ...]]]:
        with self._told():
            names = self._connection.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace "
                "ORDER BY oid"
            ).fetchall()
            return [(name, self._columns(name)) for (name,) in names]

    def _columns(self, table: str) -> tuple[str, ...]:
        rows = self._connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s "
            "ORDER BY ordinal_position",
            (table,),
        )
        return tuple(name for (name,) in rows)

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        with self._told(), self._connection.cursor(name="backup") as cursor:
            cursor.execute(f"SELECT {', '.join(columns)} FROM {table}".encode())
            yield from cursor

    def prepare(self, revision: str) -> None:
        with self._told():
            self._connection.execute("COMMIT")
            if self._postgres.version_of(self._connection, str(self._address)) is not None:
                raise StoreError(f"database {self._address} has tables already: a backup is restored into a new one")
            self._postgres.prepare(self._connection, str(self._address), revision)
            self._connection.execute("BEGIN")

    def insert(self, table: str, columns: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
        with self._told():
            names = _known(columns, self._columns(table), table)
            marks = ", ".join(["%s"] * len(columns))
            with self._connection.cursor() as cursor:
                cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})".encode(), rows)
                self._count_on(table, cursor)

    def _count_on(self, table: str, cursor: Any) -> None:
        """Numbers that the database gives go on after those that were restored."""
        cursor.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'public' AND table_name = %s "
            "AND is_identity = 'YES'",
            (table,),
        )
        for (column,) in cursor.fetchall():
            cursor.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), max({column})) FROM {table} "
                f"HAVING max({column}) IS NOT NULL"
            )

    def finish(self) -> None:
        with self._told():
            self._connection.execute("COMMIT")
            self._postgres.prepare(self._connection, str(self._address), NEWEST)

    def close(self) -> None:
        self._connection.close()


def _known(columns: Sequence[str], there: Sequence[str], table: str) -> str:
    """The column names of a backup, once they are known to be names of ours."""
    if not there or not set(columns) <= set(there):
        raise StoreError(
            f"the backup has a table {table!r} with columns {list(columns)!r}, which this hub does not know"
        )
    return ", ".join(columns)


def open_archive(database: Database) -> Archive:
    """Raises: StoreError: it cannot be opened."""
    return SqliteArchive(database) if isinstance(database, Path) else PostgresArchive(database)
