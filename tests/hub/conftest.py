"""One PostgreSQL for all tests of a worker process of pytest; each test has its own database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres_kit import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.close()
