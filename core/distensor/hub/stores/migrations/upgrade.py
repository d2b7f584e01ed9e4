"""Bring the tables to a version.

A database without tables gets all versions' statements one after the other. One that has tables of another version is
alembic's, which knows the way up and the way back; only then is it loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor.core.errors import StoreError
from distensor.hub.stores.migrations.ddl import Dialect
from distensor.hub.stores.migrations.versions import VERSIONS

if TYPE_CHECKING:
    from alembic.config import Config

NEWEST = VERSIONS[-1].revision
KNOWN = tuple(version.revision for version in VERSIONS)


def number_of(revision: str) -> int:
    """The place of a version, counted from 1; also what SQLite keeps as `user_version`."""
    return KNOWN.index(revision) + 1


def require_known(revision: str, where: str) -> None:
    """Raises: StoreError: a version that this program does not have."""
    if revision not in KNOWN:
        raise StoreError(
            f"database {where} has version {revision}, this hub knows up to {NEWEST}: "
            "it was written by a newer disTensor; install that version or a later one"
        )


def first_statements(dialect: Dialect, revision: str = NEWEST) -> Iterable[str]:
    """All that makes the tables of a version in an empty database."""
    for version in VERSIONS[: number_of(revision)]:
        yield from version.up.of(dialect)
    yield "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
    yield f"INSERT INTO alembic_version VALUES ('{revision}')"


def migrate(connection: Any, present: str, wanted: str, *, stamp: bool) -> None:
    """Lead a database from one version to another, by a SQLAlchemy connection in a transaction.

    `stamp`: the database is from before alembic and does not say its version itself.
    """
    from alembic import command  # see ddl.carry_out

    config = _config(connection)
    if stamp:
        command.stamp(config, present)
    if number_of(wanted) > number_of(present):
        command.upgrade(config, wanted)
    elif number_of(wanted) < number_of(present):
        command.downgrade(config, wanted)


def _config(connection: Any) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    return config
