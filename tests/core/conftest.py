"""One group of processes for all tests of the process-group helpers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from group_pool import GroupPool


@pytest.fixture(scope="session")
def four() -> Iterator[GroupPool]:
    pool = GroupPool(4)
    yield pool
    pool.close()
