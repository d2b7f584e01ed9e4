"""Where the books are, as the operator says it: a file, or a PostgreSQL database without its password."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from distensor.core.errors import ConfigError, StoreError

PASSWORD_VARIABLE = "DISTENSOR_DATABASE_PASSWORD"  # noqa: S105  # the name of a variable
_SCHEMES = ("postgresql", "postgres")
_OPTIONS = ("host", "sslmode", "sslrootcert", "target_session_attrs")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatabaseAddress:
    """A PostgreSQL database. Its text never has the password in it."""

    host: str
    """A name, an address, or the folder of a Unix socket."""
    port: int
    user: str
    name: str
    options: tuple[tuple[str, str], ...] = ()
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"postgresql at {self.host or 'the default host'}:{self.port}, database {self.name}"

    def conninfo(self) -> str:
        """In the words of libpq."""
        from psycopg.conninfo import make_conninfo

        fields = {"host": self.host, "user": self.user, "dbname": self.name, "password": self.password}
        given = {key: value for key, value in fields.items() if value}
        return make_conninfo("", port=self.port, **given, **dict(self.options))


Database: TypeAlias = Path | DatabaseAddress


def parse_database(text: str, environment: Mapping[str, str], password_file: Path | None) -> DatabaseAddress:
    """The database of an URL; the password comes from a file or the environment, never from the URL.

    Raises:
        ConfigError: the URL is of another form, or has a password in it, which every user of the machine could read.
        StoreError: the password's file cannot be read.
    """
    try:
        parts = urlsplit(text)
        port = parts.port or 5432
    except ValueError as error:
        raise ConfigError(
            f"database {_harmless(text)!r}: {error}; expected postgresql://user@host:port/name"
        ) from error
    if parts.scheme not in _SCHEMES:
        raise ConfigError(f"database {_harmless(text)!r}: expected postgresql://user@host:port/name")
    if parts.password is not None:
        raise ConfigError(
            "the database's URL has a password in it, which every user of this machine could read from the list of "
            f"processes; take it out, and set {PASSWORD_VARIABLE} or give --database-password-file"
        )
    options = dict(parse_qsl(parts.query))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ConfigError(f"database option {unknown[0]!r} is not known; there are {', '.join(_OPTIONS)}")
    host = options.pop("host", "") or unquote(parts.hostname or "")
    name = unquote(parts.path.lstrip("/"))
    if not name:
        raise ConfigError(f"database {_harmless(text)!r} names no database; expected postgresql://user@host:port/name")
    return DatabaseAddress(
        host=host,
        port=port,
        user=unquote(parts.username or ""),
        name=name,
        options=tuple(sorted(options.items())),
        password=_password(environment, password_file),
    )


def _harmless(text: str) -> str:
    return text.rpartition("@")[2][:200]


def _password(environment: Mapping[str, str], path: Path | None) -> str:
    if path is None:
        return environment.get(PASSWORD_VARIABLE, "")
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise StoreError(f"password file {path}: {error}") from error
