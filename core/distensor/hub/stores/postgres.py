"""The hub's books in PostgreSQL. One hub at a time, by an advisory lock, a lease and the generation.

The lock belongs to the connection that writes: a hub that is killed loses it at once. One that is stopped or cut off
keeps it, but no longer renews its lease, a time by the database's clock. A hub that stands by ends the connection of
such a one, and with it the lock. Whoever comes back then finds a later generation in the database and commits nothing
more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import psycopg
from psycopg import sql as words
from psycopg.adapt import Buffer
from psycopg.types.string import StrDumper

from distensor.core.errors import BooksRefusedError, StoreError, SupersededError
from distensor.core.ids import Generation
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.books import SqlBooks
from distensor.hub.stores.engine import Result, Row, Table
from distensor.hub.stores.migrations.ddl import Dialect
from distensor.hub.stores.migrations.upgrade import NEWEST, first_statements, migrate, require_known

RETRY_SECONDS = 0.5
CONNECT_SECONDS = 5
HOLD_SECONDS = 20.0
"""So long a hub waits for the lock: the database may not have noticed yet that the one before is dead."""
LEASE_SECONDS = 10.0
"""A hub that has committed nothing for so long may be replaced; it commits every two seconds, if nothing else then the
lease alone (`standby.keep_lease`)."""
_RENEWED_EVERY = 1.0
_LOOK_SECONDS = 0.5
HUB_LOCK = 0x64697374
TABLES_LOCK = HUB_LOCK + 1
LEDGER_LOCK = HUB_LOCK + 2

_SESSION = (
    # An answered commit is on the disk; a database that never answers is one that is gone; a hub that is gone loses
    # its lock after about fifteen seconds, so that another one can take over.
    "SET synchronous_commit = on",
    "SET statement_timeout = '30s'",
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 3",
    "SET tcp_keepalives_count = 3",
)


_NOW = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_LEASE = "(SELECT value FROM meta WHERE key = 'lease')"
_FENCE = (
    f"SELECT pg_current_xact_id()::text, (SELECT value FROM meta WHERE key = 'generation' FOR SHARE), {_NOW} - {_LEASE}"
)
_RENEW = (
    f"INSERT INTO meta (key, value) VALUES ('lease', {_NOW}) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_END_HOLDER = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database "
    "WHERE datname = current_database() AND locktype = 'advisory' AND classid = 0 AND objid = %s AND objsubid = 1 "
    "AND granted"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standby:
    """How a hub waits for another's end: until `ended` is set; `tell` is called twice a second with the age of the
    other's lease in seconds, None where it has none."""

    ended: threading.Event
    tell: Callable[[float | None], None]


class _Text(StrDumper):
    """PostgreSQL's text has no NUL. Where somebody sends one, U+FFFD is kept in its place."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in obj else obj)


class PostgresEngine:
    """An `Engine` on a connection of psycopg."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._execute: Any = connection.execute

    def run(self, sql: str, values: Row = ()) -> Result:
        result: Result = self._execute(_marked(sql), values or None)
        return result

    def insert(self, table: Table, rows: Sequence[Row], otherwise: str = "") -> None:
        if rows:
            self._execute(_insert_text(table, otherwise), list(map(list, zip(*rows, strict=True))))

    def pick(self, table: Table, keys: Sequence[Row]) -> list[Any]:
        if not keys:
            return []
        found: list[Any] = self._execute(_pick_text(table), list(map(list, zip(*keys, strict=True)))).fetchall()
        return found

    def lock_ledger(self) -> None:
        self._execute("SELECT pg_advisory_xact_lock(%s)", (LEDGER_LOCK,))


@cache
def _marked(text: str) -> str:
    return text.replace("?", "%s")


def _arrays(table: Table, columns: Sequence[str]) -> str:
    return ", ".join("%s::text[]" if column in table.texts else "%s::bigint[]" for column in columns)


@cache
def _insert_text(table: Table, otherwise: str) -> str:
    columns = ", ".join(table.columns)
    rows = f"SELECT * FROM unnest({_arrays(table, table.columns)})"
    return f"INSERT INTO {table.name} ({columns}) {rows} {otherwise}"


@cache
def _pick_text(table: Table) -> str:
    columns = ", ".join(f"{table.name}.{column}" for column in table.columns)
    keys = ", ".join(table.key_columns)
    wanted = f"unnest({_arrays(table, table.key_columns)}) AS wanted ({keys})"
    return f"SELECT {columns} FROM {table.name} JOIN {wanted} USING ({keys})"


class PostgresStore:
    """A `repository.Store`. One connection that writes and one for readers, made again when they are lost.

    With `exclusive` (a hub, not a command beside it) the writing connection holds a lock of the database for as long
    as it lives. When it is lost, and another hub has taken over before it comes back, every transaction ends with
    `SupersededError`: the generation in the database is no longer ours. With `standby` a hub waits for the lock,
    without end, where it is held.

    Raises:
        StoreError: it cannot be reached, another hub holds it, or it is of a newer version.
    """

    def __init__(
        self,
        address: DatabaseAddress,
        *,
        exclusive: bool,
        hold_seconds: float = HOLD_SECONDS,
        standby: Standby | None = None,
    ) -> None:
        self._address = address
        self._hold_seconds = hold_seconds
        self._standby = standby
        self._exclusive = exclusive
        self._generation: Generation | None = None
        self._giving_up = threading.Event()
        self._reading: psycopg.Connection[Any] | None = None
        self._connection = self._connect()
        try:
            self._prepare()
        except BaseException:  # whatever it was, no connection stays behind; it goes on upwards
            self._connection.close()
            raise

    def _error(self, error: Exception) -> StoreError:
        """Operational and internal errors are the database's; all others are what the books refuse, always."""
        passing = isinstance(error, psycopg.OperationalError | psycopg.InternalError | psycopg.InterfaceError)
        kind = StoreError if passing else BooksRefusedError
        return kind(f"database {self._address}: {str(error).strip()}")

    def _prepare(self) -> None:
        try:
            prepare(self._connection, str(self._address), NEWEST)
        except psycopg.Error as error:
            raise self._error(error) from error

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = connect(self._address)
        except psycopg.Error as error:
            raise self._error(error) from error
        if self._exclusive:
            try:
                self._hold(connection)
            except BaseException:  # whatever it was, no connection stays behind; it goes on upwards
                connection.close()
                raise
        return connection

    def _hold(self, connection: psycopg.Connection[Any]) -> None:
        try:
            if self._generation is not None:
                self._require_ours(generation_of(connection))
            elif self._standby is not None:
                self._wait_for_turn(connection, self._standby)
                return
            connection.execute(f"SET lock_timeout = {round(self._hold_seconds * 1000)}".encode())
            connection.execute("SELECT pg_advisory_lock(%s)", (HUB_LOCK,))
            connection.execute("RESET lock_timeout")
        except psycopg.errors.LockNotAvailable as error:
            raise StoreError(
                f"database {self._address}: another hub is running on it; one that shall take its place when it is "
                "gone is started with --standby"
            ) from error
        except psycopg.Error as error:
            raise self._error(error) from error

    def _wait_for_turn(self, connection: psycopg.Connection[Any], standby: Standby) -> None:
        while not _row(connection.execute("SELECT pg_try_advisory_lock(%s)", (HUB_LOCK,)))[0]:
            if standby.ended.wait(_LOOK_SECONDS):
                raise StoreError(f"database {self._address}: stopped while another hub is running on it")
            age = lease_age(connection)
            standby.tell(age)
            if age is not None and age > LEASE_SECONDS:
                connection.execute(_END_HOLDER, (HUB_LOCK,))

    def _require_ours(self, generation: int | None) -> None:
        if self._generation is not None and generation != self._generation:
            raise SupersededError(
                f"database {self._address}: another hub has taken over; it is at start {generation}, "
                f"this one was start {self._generation}"
            )

    @contextmanager
    def transaction(self) -> Iterator[SqlBooks]:
        if self._connection.closed:
            self._connection = self._connect()
        connection = self._connection
        transaction_id = ""
        try:
            connection.execute("BEGIN")
            transaction_id = self._fence(connection)
            yield _FencedBooks(connection, self)
        except psycopg.Error as error:
            self._roll_back(connection)
            raise self._error(error) from error
        except BaseException:  # whatever it was, nothing of it stays; it goes on upwards
            self._roll_back(connection)
            raise
        self._commit(connection, transaction_id)

    def _fence(self, connection: psycopg.Connection[Any]) -> str:
        """The transaction's own number, once the generation in the database is known to be ours."""
        transaction_id, generation, age = _row(connection.execute(_FENCE))
        self._require_ours(generation)
        if self._generation is not None and (age is None or age > _RENEWED_EVERY * 1000):
            connection.execute(_RENEW)
        return str(transaction_id)

    def _commit(self, connection: psycopg.Connection[Any], transaction_id: str) -> None:
        try:
            connection.execute("COMMIT")
        except psycopg.OperationalError as error:
            # The connection may have gone before or after the commit. The database knows.
            if not connection.closed or not self._was_committed(transaction_id):
                self._roll_back(connection)
                raise self._error(error) from error
        except psycopg.Error as error:
            self._roll_back(connection)
            raise self._error(error) from error

    def _was_committed(self, transaction_id: str) -> bool:
        while not self._giving_up.wait(RETRY_SECONDS):
            with contextlib.suppress(psycopg.Error, StoreError):
                with connect(self._address) as asking:
                    try:
                        row = asking.execute("SELECT pg_xact_status(%s::text::xid8)", (transaction_id,)).fetchone()
                    except psycopg.errors.InvalidParameterValue:  # a number of the future: nothing of it was written
                        return False
                if row is not None and row[0] != "in progress":
                    return bool(row[0] == "committed")
        raise StoreError(f"database {self._address}: it went away during a commit and has not come back")

    @contextmanager
    def part(self) -> Iterator[None]:
        self._connection.execute("SAVEPOINT part")
        try:
            yield
        except (psycopg.OperationalError, psycopg.InternalError) as error:  # not the caller's data: all of it fails
            raise self._error(error) from error
        except BaseException:  # whatever it was, nothing of the part stays; it goes on upwards
            self._connection.execute("ROLLBACK TO SAVEPOINT part")
            self._connection.execute("RELEASE SAVEPOINT part")
            raise
        self._connection.execute("RELEASE SAVEPOINT part")

    def _roll_back(self, connection: psycopg.Connection[Any]) -> None:
        try:
            if not connection.closed:
                connection.execute("ROLLBACK")
        except psycopg.Error:
            connection.close()  # the database rolls back what it no longer hears of

    @contextmanager
    def reading(self) -> Iterator[SqlBooks]:
        try:
            connection = self._reader()
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                yield SqlBooks(PostgresEngine(connection))
            finally:
                self._roll_back(connection)
        except psycopg.Error as error:
            raise self._error(error) from error

    def _reader(self) -> psycopg.Connection[Any]:
        if self._reading is None or self._reading.closed:
            self._reading = connect(self._address)
        return self._reading

    def began(self, generation: Generation) -> None:
        """From now on only this generation may write."""
        self._generation = generation

    def give_up(self) -> None:
        """Wait no longer for an answer about a commit."""
        self._giving_up.set()

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _FencedBooks(SqlBooks):
    """Books whose store remembers the generation that they begin."""

    def __init__(self, connection: psycopg.Connection[Any], store: PostgresStore) -> None:
        super().__init__(PostgresEngine(connection))
        self._store = store

    def begin_generation(self) -> Generation:
        generation = super().begin_generation()
        self._run(_RENEW)
        self._store.began(generation)
        return generation


def generation_of(connection: psycopg.Connection[Any]) -> int | None:
    """How many hubs have begun on the database; None where there was none."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
    return None if row is None else int(row[0])


def lease_age(connection: psycopg.Connection[Any]) -> float | None:
    """How many seconds ago the hub on the database renewed its lease; None where none ever did."""
    try:
        age = _row(connection.execute(f"SELECT {_NOW} - {_LEASE}".encode()))[0]
    except psycopg.errors.UndefinedTable:  # the first hub is making them
        return None
    return None if age is None else age / 1000


def _row(cursor: psycopg.Cursor[Any]) -> Any:
    row = cursor.fetchone()
    assert row is not None, "a SELECT without FROM has a row"
    return row


def connect(address: DatabaseAddress) -> psycopg.Connection[Any]:
    """A connection that begins and ends its transactions by words."""
    connection = psycopg.connect(
        address.conninfo(), autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="distensor hub"
    )
    connection.adapters.register_dumper(str, _Text)
    for setting in _SESSION:
        connection.execute(words.SQL(setting))
    return connection


def prepare(connection: psycopg.Connection[Any], where: str, wanted: str) -> None:
    """Make the tables, or lead them to the wanted version, all in one transaction.

    Raises:
        StoreError: the database is of a newer version than this program knows.
    """
    present = version_of(connection, where)
    if present is None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (TABLES_LOCK,))
            present = version_of(connection, where)  # again: another process may have been faster
            if present is None:
                for statement in first_statements(Dialect.POSTGRESQL, wanted):
                    connection.execute(statement.encode())
                return
    if present != wanted:
        _migrate(connection, where, wanted)


def version_of(connection: psycopg.Connection[Any], where: str) -> str | None:
    """The version of the tables; None where there are none."""
    there = connection.execute("SELECT to_regclass('alembic_version') IS NOT NULL").fetchone()
    if there is None or not there[0]:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    if row is None:
        return None
    revision = str(row[0])
    require_known(revision, where)
    return revision


def _migrate(connection: psycopg.Connection[Any], where: str, wanted: str) -> None:
    import sqlalchemy  # see migrations.ddl.carry_out
    from sqlalchemy.pool import StaticPool

    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: connection, poolclass=StaticPool)
    connection.autocommit = False
    try:
        with engine.connect() as session, session.begin():
            session.exec_driver_sql(f"SELECT pg_advisory_xact_lock({TABLES_LOCK})")
            present = version_of(connection, where)
            assert present is not None, "there were tables a moment ago, and nothing drops them"
            migrate(session, present, wanted, stamp=False)
    finally:
        connection.autocommit = True
