"""Open the books wherever they are, whole for a backup too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType

from distensor.core.errors import StoreError
from distensor.hub.repository import Store
from distensor.hub.stores.address import Database, DatabaseAddress
from distensor.hub.stores.sqlite import SqliteStore


def open_store(database: Database, *, exclusive: bool = False) -> Store:
    """`exclusive`: for a hub, which shares its database with no other one. A file is held by its state directory.

    Raises:
        StoreError: it cannot be opened, another hub holds it, or it is of a newer version.
    """
    if isinstance(database, Path):
        return SqliteStore(database)
    store: Store = postgres_of(database).PostgresStore(database, exclusive=exclusive)
    return store


def wait_for_store(
    database: DatabaseAddress, ended: threading.Event, tell: Callable[[float | None], None]
) -> Store | None:
    """The books for a hub that stands by, once no other one serves; None once `ended` is set. Blocks.

    `tell` is called twice a second with the age of the other's lease in seconds.

    Raises:
        StoreError: as `open_store`.
    """
    postgres = postgres_of(database)
    try:
        store: Store = postgres.PostgresStore(
            database, exclusive=True, standby=postgres.Standby(ended=ended, tell=tell)
        )
    except StoreError:
        if ended.is_set():
            return None
        raise
    return store


def lease_age_of(database: DatabaseAddress) -> float | None:
    """How many seconds ago a hub in this database said that it serves; None where none ever did.

    Raises:
        StoreError: the database does not answer.
    """
    postgres = postgres_of(database)
    try:
        with closing(postgres.connect(database)) as connection:
            age: float | None = postgres.lease_age(connection)
    except postgres.psycopg.Error as error:
        raise StoreError(f"database {database}: {str(error).strip()}") from error
    return age


def postgres_of(database: DatabaseAddress) -> ModuleType:
    """The module for PostgreSQL, which needs a driver that not everybody has.

    Raises:
        StoreError: the driver is not installed.
    """
    try:
        from distensor.hub.stores import postgres
    except ImportError as error:
        raise StoreError(
            f"{database} needs the driver psycopg, which is not installed: pip install 'distensor[cloud]'"
        ) from error
    return postgres
