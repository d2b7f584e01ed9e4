"""What the statements of the books need of a database. SQL is written once, with `?` for values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = str | int | None
Row: TypeAlias = Sequence[Value]


class Result(Protocol):
    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns for statements with many rows. The first `key` columns identify a row."""

    name: str
    columns: tuple[str, ...]
    texts: frozenset[str]
    """The columns that hold text; all others hold whole numbers."""
    key: int

    @property
    def key_columns(self) -> tuple[str, ...]:
        return self.columns[: self.key]


class Engine(Protocol):
    """One connection within one transaction."""

    def run(self, sql: str, values: Row = ()) -> Result:
        """One statement. Only `?` stands for values; a literal `?` or `%` must not occur."""

    def insert(self, table: Table, rows: Sequence[Row], otherwise: str = "") -> None:
        """Many rows at once, with different keys; `otherwise` is an ON CONFLICT clause."""

    def pick(self, table: Table, keys: Sequence[Row]) -> list[Any]:
        """The rows with these keys, whole, in any order."""

    def lock_ledger(self) -> None:
        """Wait until nobody else changes the ledger; then nobody else does until the end of the transaction."""
