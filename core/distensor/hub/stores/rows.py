"""The base of all statements: an engine, within one transaction."""

from __future__ import annotations

from distensor.hub.stores.engine import Engine


class Rows:
    """A class for each group of tables derives from this one; `books.SqlBooks` is all of them together."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._run = engine.run
